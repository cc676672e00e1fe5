"""The figures of a training: when it reached the target, and where the time of its steps went."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

from hvd_compress.tools.compare.job import Outcome, Point


class Spread(NamedTuple):
    """A figure's median and range over seeds."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread | None:
    """Aggregate the finite values; None if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return Spread(median(finite), min(finite), max(finite)) if finite else None


def span(found: Spread, form: Callable[[float], str], between: str = " to ") -> str:
    """Write the range over seeds; empty if it is a single figure."""
    low, high = form(found.low), form(found.high)
    return f"{low}{between}{high}" if low != high else ""


def with_span(found: Spread, form: Callable[[float], str]) -> str:
    """Write a median and its range, as in ``4.8 (4.5 to 5.1)``."""
    reaches = span(found, form)
    return form(found.median) + (f" ({reaches})" if reaches else "")


class TimeToTarget(NamedTuple):
    """Time at which a training reached the target."""

    seconds: float  # Training time
    steps: float  # Steps, with a fraction


def reach(outcome: Outcome, target: float) -> TimeToTarget | None:
    """Return when the metric first reached the target; None if it never did.

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


def _between(before: Point | None, after: Point, target: float) -> TimeToTarget:
    if before is None or not math.isfinite(before.metric):
        return TimeToTarget(after.seconds, float(after.step))
    part = (target - before.metric) / (after.metric - before.metric)
    return TimeToTarget(
        before.seconds + part * (after.seconds - before.seconds), before.step + part * (after.step - before.step)
    )


def final(outcome: Outcome) -> float:
    """Return the metric at the end of a run; NaN if it diverged."""
    return outcome.curve[-1].metric if outcome.curve and not outcome.diverged else math.nan


def cut(outcome: Outcome) -> bool:
    """Return whether the budget ended a run before it had all its steps."""
    return outcome.steps < outcome.goal.steps and not outcome.diverged


class Split(NamedTuple):
    """The parts of a step, in seconds."""

    compute: float  # The rest
    encode: float  # In compress; 0 if it was not measured
    wait: float  # Waiting for the network, beyond what computing hides
    decode: float  # In decompress, without waiting; 0 if it was not measured
    derived: bool = False  # Whether `wait` is what a step takes beyond computing alone, with all that was not measured
    unmeasured: tuple[str, ...] = ()  # The names of the parts that were not measured


PARTS = ("compute", "encode", "wait", "decode")
"""The parts of a `Split`, in the order of time."""


def split(outcome: Outcome) -> Split:
    encode, decode = outcome.encode or 0.0, outcome.decode or 0.0
    wait = outcome.wait
    if wait is None:
        wait = max(0.0, outcome.step_seconds - outcome.alone - encode - decode)
    compute = max(0.0, outcome.step_seconds - encode - wait - decode)
    unmeasured = tuple(name for name in PARTS[1:] if getattr(outcome, name) is None)
    return Split(compute, encode, wait, decode, outcome.wait is None, unmeasured)


def median_split(outcomes: Sequence[Outcome]) -> Split:
    """Return each part's median over the seeds."""
    splits = [split(one) for one in outcomes]
    compute, encode, wait, decode = (median(getattr(one, name) for one in splits) for name in PARTS)
    unmeasured = tuple(name for name in PARTS if any(name in one.unmeasured for one in splits))
    return Split(compute, encode, wait, decode, any(one.derived for one in splits), unmeasured)
