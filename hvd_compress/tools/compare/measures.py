"""From one training to figures: when it was good enough, and where the time of its steps went."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from hvd_compress.tools.compare.job import Outcome, Point


class Spread(NamedTuple):
    """A figure over seeds.

    Attributes:
        median: The one in the middle.
        low: The least.
        high: The largest.
    """

    median: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread | None:
    """Of finite values; None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return Spread(median(finite), min(finite), max(finite)) if finite else None


class Reach(NamedTuple):
    """When a training was good enough.

    Attributes:
        seconds: Of training.
        steps: As many, and a fraction.
    """

    seconds: float
    steps: float


def reach(outcome: Outcome, target: float) -> Reach | None:
    """When the metric first was as good as the target; None if it never was.

    Between the evaluation that shows it and the one before, the metric is taken to be linear. Where the one before is
    not finite, the moment is that of the evaluation itself.
    """
    sign = 1.0 if outcome.goal.higher_is_better else -1.0
    before: Point | None = None
    for point in outcome.curve:
        if math.isfinite(point.metric) and sign * point.metric >= sign * target:
            return _between(before, point, target)
        before = point
    return None


def _between(before: Point | None, after: Point, target: float) -> Reach:
    if before is None or not math.isfinite(before.metric):
        return Reach(after.seconds, float(after.step))
    part = (target - before.metric) / (after.metric - before.metric)
    return Reach(
        before.seconds + part * (after.seconds - before.seconds), before.step + part * (after.step - before.step)
    )


def final(outcome: Outcome) -> float:
    """The metric at the end of its run; NaN if it diverged."""
    return outcome.curve[-1].metric if outcome.curve and not outcome.diverged else math.nan


def cut(outcome: Outcome) -> bool:
    """Whether the budget ended it before it had all its steps."""
    return outcome.steps < outcome.goal.steps and not outcome.diverged


class Split(NamedTuple):
    """Where the time of a step goes, in seconds.

    Attributes:
        compute: All but the rest.
        encode: In compress; 0 if it was not measured.
        wait: For the network, beyond what computing hides.
        decode: In decompress, without waiting; 0 if it was not measured.
        derived: Whether `wait` is what a step takes beyond computing alone, for want of a measurement. All that was
            not measured is in it, then.
        unmeasured: The names of the parts that were not measured.
    """

    compute: float
    encode: float
    wait: float
    decode: float
    derived: bool = False
    unmeasured: tuple[str, ...] = ()


PARTS = ("compute", "encode", "wait", "decode")
"""Of a `Split`, in the order of time."""


def split(outcome: Outcome) -> Split:
    """Take a step apart."""
    encode, decode = outcome.encode or 0.0, outcome.decode or 0.0
    wait = outcome.wait
    if wait is None:
        wait = max(0.0, outcome.step_seconds - outcome.alone - encode - decode)
    compute = max(0.0, outcome.step_seconds - encode - wait - decode)
    unmeasured = tuple(name for name in PARTS[1:] if getattr(outcome, name) is None)
    return Split(compute, encode, wait, decode, outcome.wait is None, unmeasured)


def median_split(outcomes: Sequence[Outcome]) -> Split:
    """Each part's median over the seeds."""
    splits = [split(one) for one in outcomes]
    compute, encode, wait, decode = (median(getattr(one, name) for one in splits) for name in PARTS)
    unmeasured = tuple(name for name in PARTS if any(name in one.unmeasured for one in splits))
    return Split(compute, encode, wait, decode, any(one.derived for one in splits), unmeasured)
