"""Bar charts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hvd_compress.tools.drawing import COLOURS, PALE, blank, legend_below, note, rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROW, _MARGIN = 0.38, 1.5
"""Inches for a bar, and for what is above and below all."""


class Bar(NamedTuple):
    """A bar of a chart."""

    label: str
    value: float  # The length of the bar
    note: str  # Text beside the bar
    mark: float | None = None  # Where a line crosses it; None for no line
    strong: bool = True  # Whether it stands out


def draw(path: Path, bars: Sequence[Bar], *, title: str, axis: str, mark: str = "") -> None:
    """Write a chart of horizontal bars to an image, whose suffix tells the format; see `figure`."""
    figure(bars, title=title, axis=axis, mark=mark).savefig(path, dpi=130)


def figure(bars: Sequence[Bar], *, title: str, axis: str, mark: str = "") -> Figure:
    """Draw horizontal bars, the first on top; ``axis`` and ``mark`` name the values and the marks."""
    drawn, (axes,) = blank(9, _MARGIN + _ROW * len(bars), title)
    colours = [COLOURS[0] if bar.strong else PALE for bar in bars]
    axes.barh(range(len(bars)), [bar.value for bar in bars], color=colours, height=0.7)
    for row, bar in enumerate(bars):
        note(axes, bar.value, row, bar.note)
    marks = [(row, bar.mark) for row, bar in enumerate(bars) if bar.mark is not None]
    if marks:
        lines = axes.vlines([x for _, x in marks], [r - 0.42 for r, _ in marks], [r + 0.42 for r, _ in marks])
        lines.set(color=COLOURS[1], lw=2)
        legend_below(drawn, [lines], [mark])
    rows(axes, [bar.label for bar in bars])
    axes.set_xlim(0, max([1e-9, *(bar.value for bar in bars), *(value for _, value in marks)]))
    axes.set_xlabel(axis, fontsize=9)
    return drawn
