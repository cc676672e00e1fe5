"""Curves of a comparison: the metric against time and against steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from hvd_compress.tools.compare.judging import baseline, judge
from hvd_compress.tools.compare.report.charts import framed
from hvd_compress.tools.compare.report.curves import Line, crossing, limits, line, unequal
from hvd_compress.tools.compare.results import Comparison
from hvd_compress.tools.drawing import BASELINES, COLOURS, INK, logarithmic, plain
from hvd_compress.tools.units import metric, setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Bounds = tuple[float, float] | None

DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)))
"""Methods beyond the sixth have a colour again, but another dash."""


class Look(NamedTuple):
    colour: str
    dash: Any


def looks(comparison: Comparison) -> dict[str, Look]:
    rest = [spec for spec in comparison.methods if spec not in BASELINES]
    found = {spec: Look(COLOURS[n % 6], DASHES[n // 6 % 3]) for n, spec in enumerate(rest)}
    return found | {spec: Look(colour, "-") for spec, colour in BASELINES.items()}


def metric_by_time(comparison: Comparison) -> Figure:
    return _metric(comparison, "seconds", unequal(comparison))


def metric_by_steps(comparison: Comparison) -> Figure:
    return _metric(comparison, "step")


def _metric(comparison: Comparison, by: str, log: bool = False) -> Figure:
    what = "seconds of training" if by == "seconds" else "steps"
    drawn, axes = framed(4.8, f"{comparison.goal.metric} against {what}", comparison, 62)  # left of the legend
    bounds, styles = limits(comparison), looks(comparison)
    handles: list[tuple[Any, str]] = []
    begin, base = math.inf, baseline(comparison)
    for one in judge(comparison):
        found, look = line(comparison.of(one.spec), by, log), styles[one.spec]
        begin = min([begin, *found.at[_seen(found, bounds)]])
        handle = _draw(axes, found, look, one.spec == base)
        handles.append((handle, plain(one.spec) + _unseen(found, bounds)))
        at = crossing(found, comparison.target, comparison.goal.higher_is_better)
        if at is not None:
            axes.plot([at], [comparison.target], "o", color=look.colour, mec="white", ms=7, zorder=5)
    aim = axes.axhline(comparison.target, color=INK, lw=1, dashes=(4, 3), zorder=1)
    handles.append((aim, f"target: {setting(comparison.target)}"))
    _scale(axes, bounds, 0.0 if not log else begin if math.isfinite(begin) else 1.0)
    axes.set_xlabel(what + (", on a logarithmic axis" if log else ""), fontsize=9)
    axes.set_ylabel(plain(comparison.goal.metric), fontsize=9)
    axes.grid(color="#e6e8ea", lw=0.7)
    artists, labels = zip(*handles, strict=True)
    drawn.legend(artists, labels, loc="outside right upper", frameon=False, fontsize=9, handlelength=2.6)
    return drawn


def _scale(axes: Axes, bounds: Bounds, begin: float) -> None:
    """Begin at the first moment that is seen; 0 for an axis that is not logarithmic."""
    if bounds:
        axes.set_ylim(*bounds)
    high = axes.get_xlim()[1]
    if begin > 0:
        logarithmic(axes.xaxis, math.log10(high / begin))
    axes.set_xlim(0.8 * begin, high)


def _draw(axes: Axes, found: Line, look: Look, strong: bool) -> Any:
    """Draw median, band, and the trainings that diverged; return what stands in the legend."""
    style: dict[str, Any] = {"color": look.colour, "ls": look.dash}
    for x, y in found.lost:
        axes.plot(x, y, lw=0.8, **style)
        axes.plot(x[-1:], y[-1:], "X", color=look.colour, ms=7, mec="white", zorder=4)
    axes.fill_between(found.at, found.low, found.high, color=look.colour, alpha=0.13, lw=0)
    return axes.plot(found.at, found.median, lw=2.2 if strong else 1.7, zorder=3, **style)[0]


def _seen(found: Line, bounds: Bounds) -> Any:
    low, high = bounds or (-math.inf, math.inf)
    return (found.median >= low) & (found.median <= high)


def _unseen(found: Line, bounds: Bounds) -> str:
    """Say so if a line is not in the picture."""
    if not len(found.at):
        return " (diverged)" if found.lost else " (failed)"
    return "" if _seen(found, bounds).any() else f" (ends at {metric(found.median[-1])})"
