"""Bars of a comparison: time to the target, the parts of a step, and bytes."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any

from hvd_compress.tools.compare.judging import Judgement, Verdict, baseline, judge
from hvd_compress.tools.compare.measures import PARTS, with_span
from hvd_compress.tools.compare.results import Comparison
from hvd_compress.tools.drawing import INK, PALE, blank, legend_below, logarithmic, note, rows
from hvd_compress.tools.units import number, seconds, setting, size, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW, _REST = 0.42, 1.35
"""Inches for a row, and for all above and below."""

_GOOD, _MAYBE = "#0072b2", "#56b4e9"
_VERDICTS = {Verdict.PAYS: _GOOD, Verdict.REACHED: _GOOD, Verdict.MAY_PAY: _MAYBE, Verdict.BASELINE: INK}
_PARTS = dict(zip(PARTS, ("#9aa1a9", "#e69f00", "#d55e00", "#009e73"), strict=True))
_DERIVED = "wait, not measured: what a step takes beyond computing alone"
_LOG_FROM = 20.0
"""Bytes are on a logarithmic axis if the most are so many times the least."""


def framed(height: float, what: str, comparison: Comparison, columns: int = 105) -> tuple[Figure, Axes]:
    """Return an empty figure whose title says what was compared, in lines of so many columns."""
    title = f"{what[:1].upper()}{what[1:]}: {comparison.task}, {comparison.framework}, {comparison.where}"
    lines = textwrap.wrap(title, columns)
    drawn, (axes,) = blank(10.5, height + 0.2 * len(lines), "\n".join(lines))
    return drawn, axes


def time_to_target(comparison: Comparison) -> Figure:
    """Draw how many times sooner than the baseline each method reached the target; seconds where that did not."""
    judged, base = judge(comparison), baseline(comparison)
    relative = any(one.spec == base and one.reached for one in judged)
    goal = f"{comparison.goal.metric} {setting(comparison.target)}"
    what = f"{goal}: speedup over {base}" if relative else f"Training until {goal}"
    drawn, axes = framed(_REST + _ROW * len(judged), what, comparison)
    for row, one in enumerate(judged):
        found = one.ratio if relative else one.seconds
        if found is None:
            note(axes, 0, row, f"other seeds than {base}" if one.reached else one.verdict.value)
            continue
        axes.barh(row, found.median, height=0.62, color=_VERDICTS.get(one.verdict, PALE))
        if found.low < found.high:
            for colour, width in (("white", 4.0), (INK, 1.5)):
                axes.plot([found.low, found.high], [row, row], color=colour, lw=width, marker="|", ms=9, mew=width)
        note(axes, found.high, row, _figures(one, relative))
    rows(axes, [one.spec for one in judged])
    if relative:
        axes.axvline(1, color=INK, lw=1, dashes=(4, 3), zorder=0)
    axes.set_xlim(left=0)
    longer = f"speedup over {base}, the better of none and fp16 (dashed: 1); longer is better"
    axes.set_xlabel(longer if relative else "seconds of training; shorter is better", fontsize=9)
    return drawn


def _figures(one: Judgement, relative: bool) -> str:
    """Write as in ``4.8 (4.5 to 5.1), in 41.2 s``."""
    if one.seconds is None:
        return ""
    if relative and one.ratio:
        return f"{with_span(one.ratio, times)}, in {seconds(one.seconds.median)} s{one.only}"
    return one.took


def step_split(comparison: Comparison) -> Figure:
    """Draw the parts of a step."""
    judged = [one for one in judge(comparison) if one.split]
    drawn, axes = framed(_REST + 0.3 + _ROW * len(judged), "Where the time of a step goes", comparison)
    named: dict[str, Any] = {}
    for row, one in enumerate(judged):
        left = 0.0
        for part in PARTS:
            if not getattr(one.split, part):
                continue
            ms, derived = 1000 * getattr(one.split, part), bool(one.split and one.split.derived and part == "wait")
            look: dict[str, Any] = {"hatch": "////", "facecolor": "white"} if derived else {"facecolor": _PARTS[part]}
            bar = axes.barh(row, ms, left=left, height=0.62, edgecolor=_PARTS[part], lw=0.5, **look)
            named.setdefault(_DERIVED if derived else part, bar)
            left += ms
        note(axes, left, row, f"{number(1000 * (one.step or 0))} ms")
    rows(axes, [one.spec for one in judged])
    axes.set_xlim(left=0)
    axes.set_xlabel("ms", fontsize=9)
    order = [name for name in (*PARTS, _DERIVED) if name in named]
    legend_below(drawn, [named[name] for name in order], order)
    return drawn


def bytes_per_step(comparison: Comparison) -> Figure:
    """Draw the payload of a step, beside what passes the network device."""
    judged = [one for one in judge(comparison) if one.payload is not None]
    drawn, axes = framed(_REST + 0.3 + 1.5 * _ROW * len(judged), "Bytes in each step", comparison)
    gradients = comparison.outcomes[0].gradient_bytes
    kinds = [("handed to Horovod", "payload", _GOOD, -0.2), ("at the network device", "device", "#e69f00", 0.2)]
    known = [value for one in judged for value in (one.payload, one.device) if value]
    decades = math.log10(max([gradients, *known]) / min([gradients, *known]))
    handles: dict[str, Any] = {}
    for label, name, colour, place in kinds:
        for row, one in enumerate(judged):
            value = getattr(one, name)
            if value is not None:
                handles[label] = axes.barh(row + place, value, height=0.36, color=colour)
                note(axes, value, row + place, size(value))
    handles["gradients in full precision"] = axes.axvline(gradients, color=INK, lw=1, dashes=(4, 3), zorder=0)
    rows(axes, [one.spec for one in judged])
    if 10**decades > _LOG_FROM:
        logarithmic(axes.xaxis, decades, size)
        axes.set_xlim(left=10 ** math.floor(math.log10(min(known)) - 0.3))
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(lambda value, _: size(value))
    axes.set_xlabel(f"bytes{' on a logarithmic axis' if 10**decades > _LOG_FROM else ''}", fontsize=9)
    legend_below(drawn, list(handles.values()), list(handles))
    return drawn
