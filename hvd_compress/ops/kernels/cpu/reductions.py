"""Reductions: peaks, sums, norms."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import types

from hvd_compress.ops.kernels.cpu.bits import MAGNITUDE, bits_of, float_of
from hvd_compress.ops.kernels.cpu.compiled import FLOATS, FLOATS_OUT, NOTHING, given, loop, part, total

Floats: TypeAlias = npt.NDArray[np.float32]


def norms(rows: Floats) -> Floats:
    """L2 norms along the last axis of a matrix."""
    found = np.empty(len(rows), np.float32)
    _norms(rows, found)
    return found


def absmax(x: Floats) -> Floats:
    """The largest magnitude along the last axis of an array of one or two axes; nan if there is one."""
    found = np.empty(x.shape[:-1], np.float32)
    _peaks(x.reshape(-1), found.reshape(-1))
    return found


@part
def peak_of(x: Any, start: Any, stop: Any) -> Any:
    """Return the largest magnitude from ``start`` to ``stop``."""
    peak, part_of = np.uint32(0), x[start:stop]
    for i in range(stop - start):
        peak = max(peak, np.uint32(bits_of(part_of[i]) & MAGNITUDE))
    return float_of(peak)


@total
def squares_of(x: Any, start: Any, stop: Any) -> Any:
    """Return the sum of the squares from ``start`` to ``stop``, which fits a float64 whatever they are."""
    squares: Any = 0.0
    part_of = x[start:stop]
    for i in range(stop - start):
        one = np.float64(part_of[i])
        squares += one * one
    return squares


@loop(NOTHING, FLOATS, FLOATS_OUT)
def _peaks(x: Any, out: Any) -> None:
    """The largest magnitude of each of as many parts as there is room for."""
    size = x.size // max(out.size, 1)
    for row in range(out.size):
        out[row] = peak_of(x, row * size, (row + 1) * size)


@loop(NOTHING, given(types.float32, 2), FLOATS_OUT)
def _norms(rows: Any, out: Any) -> None:
    """The L2 norm of each row."""
    for row in range(rows.shape[0]):
        out[row] = np.float32(np.sqrt(squares_of(rows[row], 0, rows.shape[1])))
