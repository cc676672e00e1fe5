"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from hvd_compress.methods import MethodInfo
from hvd_compress.tools.bench import page
from hvd_compress.tools.bench.catalogue import numbers, short
from hvd_compress.tools.bench.traffic import SIZES


def methods_table(lines: Sequence[MethodInfo]) -> Table:
    """The catalogue."""
    drawn = Table(
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
        leading=1,
        caption=f"Bits: sent by a rank for each coordinate, with {', '.join(map(str, SIZES))} ranks."
        " State: bytes kept for each coordinate.",
    )
    # The widths are those of the longest words, so that none is cut in 80 columns.
    drawn.add_column("Method", no_wrap=True, style="bold")
    drawn.add_column("Travels by", width=11)
    drawn.add_column("Rounds", justify="right")
    drawn.add_column("All-\nreduce")
    drawn.add_column("Unbiased", width=11)
    drawn.add_column("State", justify="right", min_width=5)
    drawn.add_column("Bits", justify="right", min_width=6)
    drawn.add_column("Paper", width=12, style="dim")
    for line in lines:
        drawn.add_row(line.name, line.collective, *_facts(line), short(line.paper))
    return drawn


def _facts(line: MethodInfo) -> tuple[str, ...]:
    rounds, allreduce, state, bits = numbers(line.name)
    return rounds, allreduce, line.unbiased, state, bits.replace(" / ", "\n")


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
