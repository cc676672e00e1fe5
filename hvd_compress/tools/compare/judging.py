"""Derive verdicts from a comparison: which methods pay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from statistics import median
from typing import NamedTuple

from hvd_compress.tools.bench.distributed.results import BASELINES
from hvd_compress.tools.compare.job import Outcome
from hvd_compress.tools.compare.measures import (
    Split,
    Spread,
    TimeToTarget,
    cut,
    final,
    median_split,
    reach,
    span,
    spread,
    with_span,
)
from hvd_compress.tools.compare.results import Comparison, named
from hvd_compress.tools.units import counted, metric, seconds


class Verdict(str, Enum):
    PAYS = "pays"
    MAY_PAY = "may pay"
    DOES_NOT_PAY = "does not pay"
    REACHED = "reached the target, the baseline did not"
    NOT_REACHED = "did not reach the target"
    DIVERGED = "diverged"
    FAILED = "failed"
    BASELINE = "baseline"


class Judgement(NamedTuple):
    """The judgement of a method. Fields that no run tells are None."""

    spec: str
    seeds: int  # Seeds asked for
    lr: float | None = None
    verdict: Verdict = Verdict.FAILED
    runs: int = 0  # Trainings that came to an end, diverged ones included
    reached: int = 0  # Trainings that reached the target
    seconds: Spread | None = None  # Time to the target
    steps: Spread | None = None  # Steps to the target
    ratio: Spread | None = None  # The seconds of the baseline over the method's, seed by seed
    pairs: int = 0  # The seeds of which `ratio` is: those with which both reached the target
    final: Spread | None = None  # The metric at the end of the runs that did not diverge
    trained: Spread | None = None  # Steps of a run
    cut: int = 0  # Runs that the budget ended before they had all their steps
    step: float | None = None  # The median seconds of a step
    split: Split | None = None
    payload: float | None = None  # Payload bytes per step, of the rank with most
    device: float | None = None  # Bytes per step at the device of the busiest host; None if unknown
    memory: int | None = None  # Peak bytes, the largest of all seeds
    vnmse: float | None = None  # The error of its sums; None if it was not measured
    # How much worse than the baseline it ends, as part of a sentence about the method; empty if it does not
    worse: str = ""
    warnings: tuple[str, ...] = ()  # Other parts of sentences that a reader must not miss

    @property
    def only(self) -> str:
        """With how many seeds it reached the target, as in ``, with 2 of 3 seeds``; empty if with all."""
        return f", with {self.reached} of {counted(self.seeds, 'seed')}" if self.reached < self.seeds else ""

    @property
    def took(self) -> str:
        """The time to the target, as in ``198 s (190 to 205), with 2 of 3 seeds``."""
        if self.seconds is None:
            return "an unknown time"
        reaches = span(self.seconds, seconds)
        return f"{seconds(self.seconds.median)} s{f' ({reaches})' if reaches else ''}{self.only}"


Reached = Mapping[int, TimeToTarget | None]
"""Outcomes by seed."""


def baseline(comparison: Comparison) -> str:
    """Return the better of Horovod's own methods, against which all methods are judged.

    It is the one that reaches the target with more seeds, or else sooner in the median, or else ends with the better
    metric.
    """
    sign = 1.0 if comparison.outcomes and comparison.goal.higher_is_better else -1.0

    def place(spec: str) -> tuple[float, ...]:
        there = [one.seconds for one in _reached(comparison, spec).values() if one]
        ends = spread(map(final, comparison.of(spec)))
        return len(there), -median(there) if there else 0.0, sign * ends.median if ends else -math.inf

    return max((spec for spec in reversed(BASELINES) if spec in comparison.methods), key=place)


def judge(comparison: Comparison) -> list[Judgement]:
    """Judge all methods, the best first."""
    base = baseline(comparison)
    found = [_judgement(comparison, spec, base) for spec in comparison.methods]
    sign = 1.0 if comparison.outcomes and comparison.goal.higher_is_better else -1.0
    return sorted(found, key=lambda one: _place(one, sign))


_RANKS = (
    {Verdict.PAYS, Verdict.MAY_PAY, Verdict.DOES_NOT_PAY, Verdict.REACHED, Verdict.BASELINE},
    {Verdict.NOT_REACHED},
    {Verdict.DIVERGED},
    {Verdict.FAILED},
)


def _place(one: Judgement, sign: float) -> tuple[float, ...]:
    """Sort by the target reached with all seeds and how soon; then by the final metric."""
    rank = next(number for number, verdicts in enumerate(_RANKS) if one.verdict in verdicts)
    sooner = 1.0 if one.verdict is Verdict.BASELINE else one.ratio.median if one.ratio else 0.0
    took = one.seconds.median if one.seconds else 0.0
    return rank, float(one.reached < one.seeds), -sooner, took, -sign * one.final.median if one.final else 0.0


def _reached(comparison: Comparison, spec: str) -> dict[int, TimeToTarget | None]:
    return {one.seed: reach(one, comparison.target) for one in comparison.of(spec)}


def _judgement(comparison: Comparison, spec: str, baseline: str) -> Judgement:
    outcomes, own, base = comparison.of(spec), _reached(comparison, spec), _reached(comparison, baseline)
    warnings = _warnings(comparison.seeds, outcomes)
    if not outcomes:
        return Judgement(spec, comparison.seeds, warnings=warnings)
    there = [one for one in own.values() if one]
    ratios = [_ratio(base[seed], one) for seed, one in own.items() if one and base.get(seed)]
    devices = [one.device for one in outcomes if one.device is not None]
    return Judgement(
        spec,
        comparison.seeds,
        outcomes[0].lr,
        Verdict.BASELINE if spec == baseline and there else _verdict(outcomes, own, base, comparison.seeds),
        len(outcomes),
        len(there),
        spread(one.seconds for one in there),
        spread(one.steps for one in there),
        spread(ratios),
        len(ratios),
        spread(map(final, outcomes)),
        spread(one.steps for one in outcomes),
        sum(map(cut, outcomes)),
        median(one.step_seconds for one in outcomes),
        median_split(outcomes),
        median(one.payload for one in outcomes),
        median(devices) if devices else None,
        max(one.memory for one in outcomes),
        comparison.vnmse.get(spec),
        _worse(outcomes, comparison.of(baseline)),
        warnings,
    )


def _ratio(base: TimeToTarget | None, own: TimeToTarget | None) -> float:
    """Return how many times sooner than the baseline; 0 if never, inf if the baseline never."""
    if own is None:
        return 0.0
    if base is None:
        return math.inf
    return base.seconds / own.seconds if own.seconds else 1.0  # both are good enough before the first step


def _verdict(outcomes: Sequence[Outcome], own: Reached, base: Reached, seeds: int) -> Verdict:
    there = sum(one is not None for one in own.values())
    diverged = any(one.diverged for one in outcomes)
    if not there:
        return Verdict.DIVERGED if diverged else Verdict.NOT_REACHED
    if not any(base.values()):
        return Verdict.REACHED
    # A training that failed is one that did not get there. Where neither got there, nothing is learned.
    ratios = [_ratio(one, own.get(seed)) for seed, one in base.items() if one or own.get(seed)]
    if there == seeds and not diverged and min(ratios) > 1:
        return Verdict.PAYS
    return Verdict.MAY_PAY if median(ratios) > 1 else Verdict.DOES_NOT_PAY


def _warnings(seeds: int, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    if not outcomes:
        return ("failed",)
    found = []
    diverged, missing = sum(one.diverged for one in outcomes), seeds - len(outcomes)
    if diverged:
        found.append(f"diverged with {diverged} of {counted(seeds, 'seed')}")
    if missing > 0:
        found.append(f"failed with {missing} of {counted(seeds, 'seed')}")
    if not all(one.ranks_equal for one in outcomes):
        found.append("left the ranks with different weights")
    return tuple(found)


def _worse(outcomes: Sequence[Outcome], base: Sequence[Outcome]) -> str:
    """Tell whether the final metric is worse than the baseline's: with every seed, or by more than seeds differ.

    A difference that vanishes where the two are printed, as that of fp16 often does, is none.
    """
    theirs, ours = ({one.seed: final(one) for one in ones if math.isfinite(final(one))} for ones in (base, outcomes))
    usual, found = spread(theirs.values()), spread(ours.values())
    if usual is None or found is None or metric(usual.median) == metric(found.median):
        return ""
    goal = base[0].goal
    sign = 1.0 if goal.higher_is_better else -1.0
    pairs = [sign * (theirs[seed] - ours[seed]) for seed in ours.keys() & theirs.keys()]
    if pairs and min(pairs) > 0:
        how = "with every seed" if len(pairs) > 1 else "with the one seed"
    elif len(theirs) > 1 and sign * (usual.median - found.median) > usual.high - usual.low:
        how = "by more than its seeds differ"
    else:
        return ""
    return _told_worse(f"worse {goal.metric} than {named(base[0].spec)} {how}", outcomes, found, base, usual)


def _told_worse(what: str, outcomes: Sequence[Outcome], found: Spread, base: Sequence[Outcome], usual: Spread) -> str:
    """Add the steps where those differ: a run that the budget ended had less time to learn, not less accuracy."""
    ends = f"{'is ended by the budget' if any(map(cut, outcomes)) else 'ends'} with {what}: {with_span(found, metric)}"
    ours, theirs = (median(one.steps for one in ones) for ones in (outcomes, base))
    other = f"{base[0].spec} {with_span(usual, metric)}"
    if ours == theirs:
        return f"{ends}, {other}"
    after = f"after {theirs:,.0f} steps{', where the budget ended it' if any(map(cut, base)) else ''}"
    return f"{ends} after {ours:,.0f} steps, {other} {after}"
