"""The gain over the better of none and fp16 against ranks and against bandwidth, as lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_compress.errors import SpecError
from hvd_compress.tools.advise.curves import Curve
from hvd_compress.tools.advise.model import Setup
from hvd_compress.tools.advise.validated import RANGE
from hvd_compress.tools.drawing import BASELINES, COLOURS, blank
from hvd_compress.tools.units import write_count, write_rate, write_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = len(COLOURS) + len(BASELINES)
"""Lines that can be told apart."""

_GAINS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


def check(specs: Sequence[str]) -> None:
    """Refuse a plot that nobody could read.

    Raises:
        SpecError: If there are too many lines.
    """
    if len(specs) > MOST:
        raise SpecError(
            f"a plot of {len(specs)} methods is not allowed: there can be {MOST} lines, of which none and fp16 are two;"
            f" name at most {MOST - 2} with --methods, or leave out --plot"
        )


def draw(path: Path, by_ranks: Sequence[Curve], by_bandwidth: Sequence[Curve], setup: Setup) -> None:
    """Write the plot to an image, whose suffix tells the format; see `figure`."""
    try:
        figure(by_ranks, by_bandwidth, setup).savefig(path, dpi=130)
    except ValueError as error:
        raise SpecError(f"plot={str(path)!r} is not allowed: {error}; take a name such as plan.png") from None


def figure(by_ranks: Sequence[Curve], by_bandwidth: Sequence[Curve], setup: Setup) -> Figure:
    """Draw both groups of curves side by side, with the job itself as a line across each."""
    drawn, (left, right) = blank(11, 5.4, _title(setup), columns=2)
    _lines(left, by_ranks)
    _lines(right, by_bandwidth)
    _scale_ranks(left, by_ranks[0].xs)
    _scale_bandwidths(right)
    _scale_gains(left, [*by_ranks, *by_bandwidth])
    left.set_title(f"more ranks, at {write_rate(setup.rate)}", fontsize=10)
    right.set_title(f"faster links, with {setup.ranks:,} ranks", fontsize=10)
    left.set_ylabel("step, times faster than the better of none and fp16", fontsize=9)
    for axes, here in ((left, setup.ranks), (right, setup.rate)):
        if math.isfinite(here):
            axes.axvline(here, color="#c9ccd1", lw=6, zorder=0)
    handles, labels = left.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return drawn


def _title(setup: Setup) -> str:
    hosts = f", {setup.ranks_per_node} ranks on a host" if setup.ranks_per_node > 1 else ""
    facts = f"{write_count(setup.params)} parameters, {write_time(setup.compute)} of compute{hosts}"
    marks = f"broad line: {setup.ranks:,} ranks, {write_rate(setup.rate)}; dashes: by allgather"
    return f"Predicted: {facts} ({marks})\nValidated: {RANGE}"


def _lines(axes: Axes, curves: Sequence[Curve]) -> None:
    colours = iter(COLOURS)
    for curve in curves:
        colour = BASELINES.get(curve.spec) or next(colours)
        style = (0, (4, 1.5)) if curve.grows else "solid"
        axes.plot(curve.xs, curve.gains, color=colour, lw=1.8, linestyle=style, label=curve.spec)
    axes.grid(color="#eceef0", lw=0.8)


def _scale_ranks(axes: Axes, ranks: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlabel("ranks", fontsize=9)
    shown = [2**power for power in range(1, 40, 1) if 2**power <= max(ranks)]
    _ticks(axes, "x", shown[::-1][::2][::-1] if len(shown) > 12 else shown, lambda n: f"{n:,.0f}")


def _scale_bandwidths(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_xlabel("bandwidth of a host", fontsize=9)
    _ticks(axes, "x", (100e6, 1e9, 10e9, 100e9, 400e9), lambda rate: write_rate(rate).replace(" ", "\n"))


def _scale_gains(axes: Axes, curves: Sequence[Curve]) -> None:
    gains = [gain for curve in curves for gain in curve.gains if not math.isnan(gain)]
    axes.set_yscale("log")
    least, most = min(gains) / 1.15, max(gains) * 1.15
    axes.set_ylim(least, most)
    _ticks(axes, "y", [gain for gain in _GAINS if least <= gain <= most], lambda gain: f"{gain:g}x")


def _ticks(axes: Axes, way: str, places: Sequence[float], label: Callable[[float], str]) -> None:
    axis = axes.xaxis if way == "x" else axes.yaxis
    axis.set_ticks(places, [label(place) for place in places])
    axis.set_ticks([], minor=True)
