"""Bar charts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hvd_compress.tools.bench.drawing import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW, _MARGIN = 0.38, 1.5
"""Inches for a bar, and for what is above and below all."""


class Bar(NamedTuple):
    """One line of a chart.

    Attributes:
        label: What it is.
        value: How long the bar is.
        note: Beside the bar.
        mark: Where a line crosses it; None for no line.
        strong: Whether it stands out.
    """

    label: str
    value: float
    note: str
    mark: float | None = None
    strong: bool = True


def draw(path: Path, bars: Sequence[Bar], *, title: str, axis: str, mark: str = "") -> None:
    """Write a chart of horizontal bars to an image, whose suffix tells the format; as `figure` else."""
    figure(bars, title=title, axis=axis, mark=mark).savefig(path, dpi=130)


def figure(bars: Sequence[Bar], *, title: str, axis: str, mark: str = "") -> Figure:
    """Draw horizontal bars, the first on top.

    Args:
        bars: What to draw.
        title: Above all; may have several lines.
        axis: What the values are.
        mark: What the marks are.

    Raises:
        MissingPackageError: If matplotlib is not installed.
    """
    require_matplotlib("plots")
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(9, _MARGIN + _ROW * len(bars)), layout="constrained")
    axes = drawn.add_subplot()
    places = range(len(bars))
    colours = ["#33709f" if bar.strong else "#b4b8bd" for bar in bars]
    boxes = axes.barh(places, [bar.value for bar in bars], color=colours, height=0.7)
    axes.bar_label(boxes, [bar.note for bar in bars], padding=5, fontsize=9)
    marks = [(place, bar.mark) for place, bar in zip(places, bars, strict=True) if bar.mark is not None]
    _draw_marks(axes, marks, mark)
    axes.set_yticks(places, [bar.label for bar in bars], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max([1e-9, *(bar.value for bar in bars), *(value for _, value in marks)]))
    axes.set_xlabel(axis, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    drawn.suptitle(title, fontsize=10, x=0.01, ha="left")
    return drawn


def _draw_marks(axes: Axes, marks: Sequence[tuple[int, float]], label: str) -> None:
    if marks:
        rows, values = zip(*marks, strict=True)
        axes.vlines(values, [r - 0.42 for r in rows], [r + 0.42 for r in rows], color="#d1571b", lw=2, label=label)
        axes.figure.legend(loc="outside lower left", frameon=False, fontsize=9)
