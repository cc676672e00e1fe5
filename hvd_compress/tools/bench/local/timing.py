"""Times beside those of a plain copy of the same array, so that they mean something on any machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
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


def plain_copy(n: int) -> Callable[[], object]:
    """Return a function that copies ``n`` float32."""
    return partial(np.copyto, np.zeros(n, np.float32), np.ones(n, np.float32))


def timed(function: Callable[[], object], copy: Callable[[], object], turns: int) -> Timed:
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
