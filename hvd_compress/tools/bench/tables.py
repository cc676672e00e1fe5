"""The tables of ``hvd-compress methods`` and ``hvd-compress vnmse``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from hvd_compress.methods import MethodInfo
from hvd_compress.tools.bench import page
from hvd_compress.tools.bench.catalogue import numbers, summary
from hvd_compress.tools.bench.traffic import SIZES
from hvd_compress.tools.tables import plain


def methods_table(lines: Sequence[MethodInfo]) -> Table:
    """Return a line or two for each method; the rest is in the description of one."""
    sizes = ", ".join(map(str, SIZES))
    caption = (
        f"Bits: sent by a rank for each coordinate, with {sizes} ranks. Constant: whether that stays about the same"
        " with more ranks. To see all about a method: hvd-compress methods NAME"
    )
    drawn = plain(caption=caption, caption_justify="left")
    drawn.add_column("Method", no_wrap=True, style="bold")
    drawn.add_column("Con-\nstant", no_wrap=True)
    drawn.add_column("Bits", no_wrap=True)
    drawn.add_column("Description", overflow="fold")
    for line in lines:
        _, allreduce, _, bits = numbers(line.name)
        drawn.add_row(line.name, allreduce, bits.replace(" / ", "/"), escape(summary(line.name)))
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
