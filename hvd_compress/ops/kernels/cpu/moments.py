"""Moments of what is larger than a threshold."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from hvd_compress.ops.kernels.cpu.bits import bits_of_double, double_of
from hvd_compress.ops.kernels.cpu.compiled import FLAG, FLOATS, loop, several, total
from hvd_compress.ops.packing import GROUP

_FRACTION, _ONE = np.uint64(2**52 - 1), np.uint64(1023 << 52)


def tail(x: npt.NDArray[np.float32], unit: float, threshold: float, logs: bool = False) -> npt.NDArray[np.float64]:
    """Moments of the magnitudes that are not below a threshold, as `Ops.tail` gives; with ``logs`` it is positive."""
    return np.array(_tail(x, unit, threshold, logs))


@total
def _moments(x: Any, unit: Any, threshold: Any) -> Any:
    """Number, sum and sum of squares of what is above the threshold."""
    number, first, second = np.int64(0), 0.0, 0.0
    for i in range(x.size):
        a = np.float64(abs(x[i])) / unit
        y = a - threshold if a >= threshold else 0.0
        number += np.int64(a >= threshold)
        first += y
        second += y * y
    return number, first, second


@total
def _logs(x: Any, unit: Any, threshold: Any) -> Any:
    """The sum of the logarithms, for which one is taken: of the product of the fractions, 512 times below 2."""
    product, exponents = 1.0, np.int64(0)
    for i in range(x.size):
        a = np.float64(abs(x[i])) / unit
        bits = bits_of_double(a if a >= threshold else 1.0)
        product *= double_of(bits & _FRACTION | _ONE)
        exponents += np.int64(bits >> np.uint64(52))
    return np.log(product) + (exponents - 1023 * x.size) * np.log(2.0)


@loop(several(types.float64, 4), FLOATS, types.float64, types.float64, FLAG)
def _tail(x: Any, unit: Any, threshold: Any, logs: Any) -> Any:
    number, first, second, logarithms = np.int64(0), 0.0, 0.0, 0.0
    for start in range(0, x.size, GROUP):
        some = x[start : start + GROUP]
        count, one, two = _moments(some, unit, threshold)
        number, first, second = number + count, first + one, second + two
        if logs:
            logarithms += _logs(some, unit, threshold)
    return np.float64(number), first, second, logarithms
