"""Tables for the terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from hvd_compress.bench import page
from hvd_compress.bench.catalogue import memory, written
from hvd_compress.methods import MethodInfo


def methods_table(lines: Sequence[MethodInfo]) -> Table:
    """The catalogue."""
    drawn = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, leading=1, expand=True)
    # The ratios are the longest words, so that none is cut in 80 columns.
    drawn.add_column("Method", no_wrap=True, style="bold")
    drawn.add_column("Travels by", ratio=10)
    drawn.add_column("Feedback", ratio=8)
    drawn.add_column("Keeps", ratio=9)
    drawn.add_column("Hyper-parameters", no_wrap=True)
    drawn.add_column("Paper", ratio=12, style="dim")
    for line in lines:
        parameters = "\n".join(f"{key}={brief(value)}" for key, value in line.hyper_parameters.items())
        kept = memory(line).replace("(", "").replace("=", " ").rstrip(")")
        drawn.add_row(line.name, line.collective, kept, line.state, parameters, short(line.paper))
    return drawn


def brief(value: Any) -> str:
    """A value as in spec strings, in few digits."""
    return f"{value:.3g}" if isinstance(value, float) else written(value)


def short(paper: str) -> str:
    """The authors and years of the sources, without titles."""
    return "; ".join(map(_authors, paper.split("; ")))


def _authors(source: str) -> str:
    found = re.match(r"(?P<names>\w+ et al\.|[A-Z]\w+(?:, [A-Z]\w+)*), .*, (?P<year>\d{4})", source)
    if not found:
        return source
    names = found["names"].split(", ")
    return f"{names[0]} et al. {found['year']}" if len(names) > 2 else f"{', '.join(names)} {found['year']}"


def vnmse_table(measured: Mapping[str, Any]) -> Table:
    """The errors, by budget."""
    drawn = Table(
        title="Bits per coordinate, and vNMSE of the mean", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )
    drawn.add_column("Method", overflow="fold")
    for head in ("Bits", *measured["sizes"]):
        drawn.add_column(head, justify="right", no_wrap=True)
    for budget, lines in page.rows(measured).items():
        if budget:
            drawn.add_row(f"[bold]{budget}[/bold]")
        for number, line in enumerate(lines):
            drawn.add_row(*line, end_section=number == len(lines) - 1)
    return drawn
