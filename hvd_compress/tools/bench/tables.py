"""The tables of ``hvd-compress methods`` and ``hvd-compress vnmse``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from hvd_compress.methods import MethodInfo
from hvd_compress.tools.bench import page
from hvd_compress.tools.bench.catalogue import numbers, short
from hvd_compress.tools.bench.traffic import SIZES
from hvd_compress.tools.tables import plain


def methods_table(lines: Sequence[MethodInfo]) -> Table:
    sizes = ", ".join(map(str, SIZES))
    caption = f"Bits: sent by a rank for each coordinate, with {sizes} ranks. State: bytes kept for each coordinate."
    drawn = plain(gap=0, leading=1, caption=caption)
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
        rounds, allreduce, state, bits = numbers(line.name)
        facts = (rounds, allreduce, line.unbiased, state, bits.replace(" / ", "\n"))
        drawn.add_row(line.name, line.collective, *facts, short(line.paper))
    return drawn


def vnmse_table(measured: Mapping[str, Any]) -> Table:
    """Return the errors, by budget."""
    drawn = plain("Bits per coordinate, and vNMSE of the mean")
    drawn.add_column("Method", overflow="fold")
    for head in ("Bits", *measured["sizes"]):
        drawn.add_column(head, justify="right", no_wrap=True)
    for budget, lines in page.rows(measured).items():
        if budget:
            drawn.add_row(f"[bold]{budget}[/bold]")
        for number, line in enumerate(lines):
            drawn.add_row(*line, end_section=number == len(lines) - 1)
    return drawn
