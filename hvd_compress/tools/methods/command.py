"""The subcommand ``hvd-compress methods``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.markdown import Markdown
from rich.markup import escape
from rich.table import Table

from hvd_compress.methods import MethodInfo
from hvd_compress.methods import methods as all_methods
from hvd_compress.tools.bench.traffic import SIZES, cost
from hvd_compress.tools.methods.catalogue import info, numbers, section, summary
from hvd_compress.tools.tables import plain
from hvd_compress.tools.terminal import ToJson, app, refusals, screen, write_json

_READABLE = 120
"""Columns of running text, at most."""


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="A method, to see its parameters and properties.")] = None,
    as_json: ToJson = None,
) -> None:
    """List the methods, or describe one."""
    with refusals():
        lines = [info(name)] if name else all_methods()
        if as_json:
            facts = [line._asdict() | cost(line.name)._asdict() for line in lines]
            write_json(as_json, facts[0] if name else facts)
        shown = Markdown(section(name)) if name else _table(lines)
        screen().print(shown, width=min(screen().width, _READABLE))


def _table(lines: Sequence[MethodInfo]) -> Table:
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
