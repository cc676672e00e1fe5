"""The search for the partition of gradients into buckets with which real steps are fastest (MergeComp).

Without any framework: it is told how long steps took, and says which partition to take next. All ranks run the same
search and must tell it the same, so they agree on each `Timing` before they go on with it.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from itertools import accumulate
from statistics import median
from typing import NamedTuple, TypeAlias

from hvd_compress.bucketing import Cuts, nearest, pin, start

STEPS = 100
"""After so many steps at the latest, the search has ended."""

WARM_UP = 4
"""Steps at the beginning that do not count: memory is touched, and libraries choose their kernels."""

TIMED = 5
"""Steps that are timed for each candidate, after one that is not: it pays for the change."""

TRIALS = (STEPS - WARM_UP) // (TIMED + 1)

GAIN = 0.02
"""What a partition must at least be faster by to replace another one."""


class Timing(NamedTuple):
    """How long the steps of a candidate took.

    Attributes:
        seconds: The median: the fastest step would favour what is fast now and then, the mean what no pause has hit.
        spread: The median distance from it.
    """

    seconds: float
    spread: float

    @classmethod
    def of(cls, steps: Sequence[float]) -> Timing:
        """Sum up some steps."""
        middle = median(steps)
        return cls(middle, median(abs(step - middle) for step in steps))

    def beats(self, other: Timing) -> bool:
        """Whether this is faster by more than the least gain, and by more than chance explains."""
        return self.seconds < other.seconds - max(GAIN * other.seconds, self.spread + other.spread)


Exploring: TypeAlias = Generator[Cuts, Timing, Cuts]

_UNKNOWN = Timing(math.inf, 0.0)
"""Of candidates that no steps are left for."""


def explore(sizes: Sequence[int]) -> Exploring:
    """Yield one candidate after another, to be resumed with its timing; return the best.

    As MergeComp's Algorithm 2: the best partition into y = 2 buckets is found by a binary search for its split, then
    the best with one more, as long as that gains enough. To end within `STEPS`, that one is looked for with the splits
    of before where they are: in the middle of each bucket, then around the best of these.

    The best of many candidates has been lucky, too. So it is measured once more, right after the first partition, and
    takes its place only if it is better again.

    Args:
        sizes: Of the gradients, in the order in which backward comes to them.
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
        """Add the best position that there is in some buckets to a partition."""
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
    """Where the buckets of more than one gradient begin and end."""
    return [(a, b) for a, b in zip((0, *cuts), (*cuts, end), strict=True) if b - a > 1]


class Search:
    """A search under way.

    Args:
        sizes: Of the gradients, in the order in which backward comes to them.
        timings: Of a search that was saved: it goes on from there.

    Attributes:
        cuts: The partition to take for the next step.
        settled: Whether that is the end of it.
        timings: Of all candidates so far, in order.
        steps: How many there have been, not counting those of a search that was saved.
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
            self.decide(Timing(*timing))
        self._skip = WARM_UP + 1

    def record(self, seconds: float) -> Timing | None:
        """Take in how long a step took.

        Returns:
            The timing of the candidate, once it has had all its steps: to be agreed on and given to `decide`.
        """
        self.steps += 1
        if self._skip:
            self._skip -= 1
            return None
        self._times.append(seconds)
        return Timing.of(self._times) if len(self._times) == TIMED else None

    def decide(self, timing: Timing) -> None:
        """Go on to the next candidate, with the same timing on all ranks."""
        if self.settled:
            return
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

    def report(self) -> str:
        """What was found, and how: one line."""
        times: dict[str, list[str]] = {}
        for cuts, timing in zip(self._candidates, self.timings, strict=False):
            times.setdefault(f"merge={pin(cuts)!r}", []).append(f"{timing.seconds:.4g}")
        tried = [f"{candidate} {' and '.join(seconds)} s" for candidate, seconds in times.items()]
        return (
            f"merge='search' has settled on merge={pin(self.cuts)!r} after {self.steps} steps;"
            f" candidates and their median step times: {', '.join(tried) or 'no other is possible'}"
        )
