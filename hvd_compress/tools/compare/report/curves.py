"""The lines of a figure: medians over seeds, and the range that is worth drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress.tools.compare.job import Outcome
from hvd_compress.tools.compare.judging import baseline
from hvd_compress.tools.compare.measures import final, reach
from hvd_compress.tools.compare.results import Comparison

Floats = npt.NDArray[np.float64]

LOG_FROM = 8.0
"""An axis of times is logarithmic if the longest training took so many times as long as the shortest."""

_CLEAR = 3.0
"""Extent of a picture towards the bad side, as a multiple of the range in which the trainings end."""


class Line(NamedTuple):
    """A method's curve."""

    at: Floats  # Seconds or steps
    median: Floats  # The median over the seeds that did not diverge
    low: Floats  # The least of them
    high: Floats  # The largest of them
    lost: list[tuple[Floats, Floats]]  # The curves of those that diverged, as far as they were finite


def line(outcomes: Sequence[Outcome], by: str, positive: bool = False) -> Line:
    """Return the median over seeds, from where all of them are known to where one ends.

    Args:
        outcomes: Outcomes of one method.
        by: The name of what it goes by: ``"seconds"`` or ``"step"``.
        positive: Whether what is not above 0 is left out, as logarithms want it.
    """
    curves = [_finite(one, by, positive) for one in outcomes]
    lost = [found for one, found in zip(outcomes, curves, strict=True) if one.diverged and len(found[0])]
    whole = [found for one, found in zip(outcomes, curves, strict=True) if not one.diverged and len(found[0])]
    if not whole:
        nothing = np.zeros(0)
        return Line(nothing, nothing, nothing, nothing, lost)
    begin, end = max(x[0] for x, _ in whole), min(x[-1] for x, _ in whole)
    at = np.unique(np.concatenate([x for x, _ in whole]))  # all corners of all curves
    at = at[(at >= begin) & (at <= end)]
    rows = np.stack([np.interp(at, x, y) for x, y in whole])
    return Line(at, np.median(rows, 0), rows.min(0), rows.max(0), lost)


def crossing(found: Line, target: float, higher_is_better: bool) -> float | None:
    """Return where the median first reaches the target, between two points; None if it does not."""
    sign = 1.0 if higher_is_better else -1.0
    there = np.flatnonzero(sign * found.median >= sign * target)
    if not len(there):
        return None
    end = int(there[0])
    begin = max(end - 1, 0)
    (x, y), (x2, y2) = ((found.at[i], found.median[i]) for i in (begin, end))
    return float(x if y2 == y else x + (target - y) / (y2 - y) * (x2 - x))


def _finite(outcome: Outcome, by: str, positive: bool) -> tuple[Floats, Floats]:
    points = [(float(getattr(one, by)), one.metric) for one in outcome.curve]
    kept = [(x, y) for x, y in points if math.isfinite(y) and (x > 0 or not positive)]
    found = np.array(kept, dtype=np.float64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def unequal(comparison: Comparison) -> bool:
    """Return whether trainings took so unequally long that the short ones could not be seen."""
    ends = [one.curve[-1].seconds for one in comparison.outcomes if one.curve and not one.diverged]
    ends = [end for end in ends if end > 0]
    return bool(ends) and max(ends) > LOG_FROM * min(ends)


def limits(comparison: Comparison) -> tuple[float, float] | None:
    """Return the range of the metric to draw: where the trainings end that count, and not where all begin.

    A perplexity falls from thousands to a hundred, and what tells methods apart is at the end. What counts is the
    target, where the baseline ends, and where those end that reached the target.
    """
    finite = [p.metric for one in comparison.outcomes for p in one.curve if math.isfinite(p.metric)]
    if not finite:
        return None
    base = baseline(comparison)
    ends = [one for one in comparison.outcomes if one.spec == base or reach(one, comparison.target)]
    core = [end for end in map(final, ends or comparison.outcomes) if math.isfinite(end)] + [comparison.target]
    height = max(max(core) - min(core), 0.1 * abs(comparison.target)) or max(finite) - min(finite) or 1.0
    low, high = min([comparison.target, *finite]), max([comparison.target, *finite])
    if comparison.goal.higher_is_better:
        low = max(low, min(core) - _CLEAR * height)
    else:
        high = min(high, max(core) + _CLEAR * height)
    margin = 0.03 * (high - low)
    return low - margin, high + margin
