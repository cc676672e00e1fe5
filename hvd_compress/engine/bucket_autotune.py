"""Autotune bucket boundaries from measured step times (MergeComp).

The search is independent of any framework: it takes step times and returns the next partition to try. All ranks run
the same search, so they must agree on each `Timing` before they pass it in.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from itertools import accumulate
from typing import TypeAlias

from hvd_compress.core.bucketing import Cuts, nearest, pin, start
from hvd_compress.engine.timing import Timing

STEPS = 100
"""Maximum number of steps of a search."""

WARM_UP = 4
"""Warm-up steps, not timed: they include memory allocation and kernel selection."""

TIMED = 5
"""Timed steps of each candidate, after one untimed step that includes the change of buckets."""

TRIALS = (STEPS - WARM_UP) // (TIMED + 1)

Exploring: TypeAlias = Generator[Cuts, Timing, Cuts]

_UNKNOWN = Timing(math.inf, 0.0)
"""Timing of candidates without steps left."""


def explore(sizes: Sequence[int]) -> Exploring:
    """Yield one candidate after another, each resumed with its timing; return the best.

    1. Find the best partition into 2 buckets by a binary search for its split (MergeComp, Algorithm 2).
    2. Add one bucket at a time while that gains enough. To end within `STEPS`, existing splits stay fixed: try the
       middle of each bucket, then positions around the best of these.
    3. The best of many candidates was partly lucky. Time the first partition and the best one again, and return the
       best only if it wins again.

    Args:
        sizes: Bytes of the gradients, in backward order.
    """
    known: dict[Cuts, Timing] = {}

    def timing(cuts: Cuts) -> Generator[Cuts, Timing, Timing]:
        if cuts not in known and len(known) < TRIALS - 2:
            known[cuts] = yield cuts
        return known.get(cuts, _UNKNOWN)

    def beats(cuts: Cuts, other: Cuts) -> Generator[Cuts, Timing, bool]:
        theirs = yield from timing(other)
        return (yield from timing(cuts)).beats(theirs)

    def split(cuts: Cuts, buckets: Sequence[tuple[int, int]], halvings: int) -> Exploring:
        """Add the best new position within the given buckets to a partition."""
        best, centre, (first, last) = cuts, 0.0, (0, 0)
        for bucket in buckets:
            place = (before[bucket[0]] + before[bucket[1]]) / 2
            cut = _with(cuts, nearest(sizes, place, *bucket))
            if best == cuts or (yield from beats(cut, best)):
                best, centre, (first, last) = cut, place, bucket
        reach = (before[last] - before[first]) / 4
        for _ in range(halvings):
            for place in (centre - reach, centre + reach):
                cut = _with(cuts, nearest(sizes, place, first, last))
                if (yield from beats(cut, best)):
                    best, centre = cut, place
                    break
            reach /= 2
        return best

    before = list(accumulate(sizes, initial=0))
    begin = start(sizes)
    if not begin:
        return begin
    best = yield from split((), [(0, len(sizes))], halvings=3)
    if (yield from beats((), best)):
        best = ()
    gains = yield from beats(best, ())
    while gains and (buckets := _divisible(best, len(sizes))):
        found = yield from split(best, buckets, halvings=2)
        gains = yield from beats(found, best)
        best = found if gains else best
    if best != begin:
        reference, again = (yield begin), (yield best)
        best = best if again.beats(reference) else begin
    return best


def _with(cuts: Cuts, cut: int) -> Cuts:
    return tuple(sorted({*cuts, cut}))


def _divisible(cuts: Cuts, end: int) -> list[tuple[int, int]]:
    """Return the ranges of the buckets with more than one gradient."""
    return [(a, b) for a, b in zip((0, *cuts), (*cuts, end), strict=True) if b - a > 1]


class Search:
    """State of a search.

    Args:
        sizes: Bytes of the gradients, in backward order.
        timings: Timings of a saved search, which this one continues.

    Attributes:
        cuts: The partition of the next step.
        settled: Whether the search has ended.
        timings: Timings of all candidates so far, in order.
        steps: Number of steps, without those of a saved search.
    """

    def __init__(self, sizes: Sequence[int], timings: Sequence[Sequence[float]] = ()) -> None:
        self._exploring = explore(sizes)
        self._candidates: list[Cuts] = []
        self._times: list[float] = []
        self.settled = False
        self.timings: list[Timing] = []
        self.steps = 0
        self._go_on(None)
        for timing in timings:
            self.decide(timing)
        self._skip = WARM_UP + 1

    def record(self, seconds: float) -> Timing | None:
        """Record the time of a step in seconds.

        Returns:
            The timing of the candidate after its last step, else None. Agree on it across ranks, then call `decide`.
        """
        if self.settled:
            return None
        self.steps += 1
        if self._skip:
            self._skip -= 1
            return None
        self._times.append(seconds)
        return Timing.of(self._times) if len(self._times) == TIMED else None

    def decide(self, told: Sequence[float]) -> None:
        """Move to the next candidate, given the same timing on all ranks."""
        if self.settled:
            return
        timing = Timing(*told)
        self.timings.append(timing)
        self._times.clear()
        before = self.cuts
        self._go_on(timing)
        self._skip = 1 if self.cuts != before else 0

    def _go_on(self, timing: Timing | None) -> None:
        try:
            self.cuts = self._exploring.send(timing) if timing else next(self._exploring)
            self._candidates.append(self.cuts)
        except StopIteration as end:
            self.cuts, self.settled = end.value, True

    @property
    def saved(self) -> list[list[float]] | None:
        """Timings so far, to be saved; None if the search has ended."""
        return None if self.settled else [list(timing) for timing in self.timings]

    def news(self) -> str:
        """Summarise the result in one line; "" before the end."""
        if not self.settled:
            return ""
        times: dict[str, list[str]] = {}
        for cuts, timing in zip(self._candidates, self.timings, strict=False):
            times.setdefault(f"merge={pin(cuts)!r}", []).append(f"{timing.seconds:.4g}")
        tried = [f"{candidate} {' and '.join(seconds)} s" for candidate, seconds in times.items()]
        return (
            f"merge='search' chose merge={pin(self.cuts)!r} after {self.steps} steps;"
            f" candidates and their median step times: {', '.join(tried) or 'no other is possible'}"
        )
