"""Step times of candidates, and when one is faster than another."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

GAIN = 0.02
"""Minimum relative gain for a candidate to replace another one."""


class Timing(NamedTuple):
    """Step time of a candidate.

    Attributes:
        seconds: Median step time. The minimum favours candidates that are fast only at times; the mean is skewed by
            pauses.
        spread: Median absolute deviation from it, in seconds.
    """

    seconds: float
    spread: float

    @classmethod
    def of(cls, steps: Sequence[float]) -> Timing:
        """Summarise step times in seconds."""
        middle = median(steps)
        return cls(middle, median(abs(step - middle) for step in steps))

    def beats(self, other: Timing) -> bool:
        """Return whether this is faster by more than the minimum gain and more than the noise."""
        return self.seconds < other.seconds - max(GAIN * other.seconds, self.spread + other.spread)
