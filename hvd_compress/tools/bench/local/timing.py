"""Times beside those of a plain copy of the same array, so that they mean something on any machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class Timed(NamedTuple):
    """Medians over several turns, in seconds."""

    seconds: float
    copy: float  # Seconds of a plain copy of the gradient or array

    @property
    def ratio(self) -> float:
        return self.seconds / self.copy


class Copy:
    """A plain copy of an array of ``n`` float32.

    Args:
        n: How many float32 the array has.
    """

    def __init__(self, n: int) -> None:
        self._from, self._to = np.ones(n, np.float32), np.zeros(n, np.float32)

    def __call__(self) -> None:
        np.copyto(self._to, self._from)


def timed(function: Callable[[], object], copy: Copy, turns: int) -> Timed:
    """Time a function and a copy by turns, after one call of the function that does not count."""
    function()
    own, copies = [], []
    for _ in range(turns):
        copies.append(seconds(copy))
        own.append(seconds(function))
    return Timed(median(own), median(copies))


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
