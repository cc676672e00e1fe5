"""Tables for the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from hvd_compress.tools.units import NONE


def plain(title: str | None = None, gap: int = 1, **options: Any) -> Table:
    """Return an empty table with a line below its heads, and so much space between columns."""
    return Table(title=title, box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), show_edge=False, **options)


def markdown(rows: Sequence[Sequence[str]], align: str) -> str:
    """Return a Markdown table; the first row is its head, ``align`` has an l or an r for each column."""
    rule = tuple("---:" if side == "r" else "---" for side in align)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [rows[0], rule, *rows[1:]])


class Grid(NamedTuple):
    """A table whose first column is the name, with as many of the others, from the left, as there is room for.

    Empty columns are left out.

    Attributes:
        title: The text above it.
        heads: The heads of all columns.
        rows: The cells.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table, and say how many columns there was no room for."""
        used = [0, *(c for c in range(1, len(self.heads)) if any(row[c] != NONE for row in self.rows))]
        # Two spaces come after each column but the last, which has one.
        ends = list(accumulate((self._width(column) + 2 for column in used), initial=-1))[1:]
        room = sum(end <= options.max_width for end in ends)
        yield self._table(used[: max(room, 1)])
        if 0 < room < len(used):
            yield Text(f"{len(used) - room} more in a terminal with {ends[-1]} columns, or by --json.", style="dim")

    def _width(self, column: int) -> int:
        return max(len(line) for row in (self.heads, *self.rows) for line in row[column].split("\n"))

    def _table(self, columns: Sequence[int]) -> Table:
        table = plain(self.title, title_justify="left")
        for column in columns:
            side: Literal["left", "right"] = "right" if column else "left"
            table.add_column(self.heads[column], justify=side, overflow="fold", no_wrap=bool(column))
        for row in self.rows:
            table.add_row(*(row[column] for column in columns))
        return table
