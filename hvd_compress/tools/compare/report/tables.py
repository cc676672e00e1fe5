"""The results as a table: for the terminal and for the page."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from hvd_compress.tools import units
from hvd_compress.tools.compare.judging import Judgement, baseline, judge
from hvd_compress.tools.compare.measures import Spread, span
from hvd_compress.tools.compare.results import Comparison
from hvd_compress.tools.tables import plain
from hvd_compress.tools.units import NONE, error, number, seconds, setting, size, times

WIDE = 120
"""Columns of a terminal in which there is room for more than what counts most."""

PAGE = 1000
"""Width that is enough for all columns."""


class Cell(NamedTuple):
    """A cell of a table."""

    text: str
    under: str = ""  # More of it, in small: the range over the seeds


class Column(NamedTuple):
    """A column of a table."""

    head: str
    cell: Callable[[Judgement], Cell]
    width: int = 0  # Terminals with fewer columns do without it


def columns(comparison: Comparison, width: int = PAGE) -> list[Column]:
    """Return the columns, the method first and the verdict last, without those that are known of no method."""
    metric = comparison.goal.metric if comparison.outcomes else ""
    found = [
        Column("Learning rate", lambda one: Cell(NONE if one.lr is None else setting(one.lr)), PAGE),
        Column("Time to target, s", lambda one: _spread(one.seconds, seconds)),
        Column(f"Speedup over {baseline(comparison)}", lambda one: _spread(one.ratio, times)),
        Column("Seeds at target", lambda one: Cell(f"{one.reached} of {one.seeds}")),
        Column("Steps to target", lambda one: _spread(one.steps, _whole), PAGE),
        Column(f"Final {metric}", lambda one: _spread(one.final, units.metric)),
        Column("Steps trained", lambda one: _spread(one.trained, _whole), PAGE),
        Column("Step, ms", lambda one: Cell(NONE if one.step is None else number(1000 * one.step))),
        Column("Bytes to Horovod", lambda one: Cell(size(one.payload)), WIDE),
        Column("Bytes at device", lambda one: Cell(size(one.device)), WIDE),
        Column("vNMSE", lambda one: Cell(NONE if one.vnmse is None else error(one.vnmse)), WIDE),
        Column("Peak memory", lambda one: Cell(size(one.memory)), WIDE),
    ]
    judged = judge(comparison)
    if not any(one.cut for one in judged):  # all have the same
        found = [one for one in found if one.head != "Steps trained"]
    used = [one for one in found if width >= one.width and any(one.cell(other).text != NONE for other in judged)]
    under = any(one.lr is not None for one in judged) and width < PAGE
    first = Column(
        "Method", lambda one: Cell(one.spec, f"lr {setting(one.lr)}" if under and one.lr is not None else "")
    )
    return [
        first,
        *used,
        Column("Verdict", lambda one: Cell(one.verdict.value, f"worse {metric}" if one.worse else "")),
    ]


def main_table(comparison: Comparison, width: int = WIDE) -> Table:
    """Return a table for a terminal of so many columns; narrow ones, from 80 on, get fewer."""
    title = f"{comparison.task}, {comparison.framework}, {comparison.where}; target: {target(comparison)}"
    drawn = plain(escape(title), int(width >= WIDE), title_justify="left")
    chosen = columns(comparison, width)
    for column in chosen[:1]:
        drawn.add_column(column.head, overflow="fold")  # has what the others leave
    for column in chosen[1:-1]:
        words = [part for word in column.head.split() for part in textwrap.wrap(word, 13)]
        head = textwrap.fill(" ".join(words), 7, break_long_words=False)
        drawn.add_column(escape(head), justify="right", no_wrap=True)
    drawn.add_column(chosen[-1].head, width=13, overflow="fold")
    for one in judge(comparison):
        drawn.add_row(*(escape("\n".join(filter(None, column.cell(one)))) for column in chosen))
    return drawn


def main_table_cells(comparison: Comparison) -> list[list[str]]:
    """Return the table as text with all columns, its heads first."""
    chosen = columns(comparison)
    heads = [column.head for column in chosen]
    return [heads, *([_inline(column.cell(one)) for column in chosen] for one in judge(comparison))]


def target(comparison: Comparison) -> str:
    """Return the target, as in ``accuracy of at least 0.9``."""
    if not comparison.outcomes:
        return setting(comparison.target)
    goal = comparison.goal
    return f"{goal.metric} of at {'least' if goal.higher_is_better else 'most'} {setting(comparison.target)}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _inline(cell: Cell) -> str:
    return f"{cell.text} ({cell.under})" if cell.under else cell.text


def _spread(found: Spread | None, form: Callable[[float], str]) -> Cell:
    return Cell(form(found.median), span(found, form, "\u2013")) if found else Cell(NONE)
