"""Even steps between two numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.ops.kernels.cpu.compiled import BYTES, BYTES_OUT, FLOAT, FLOATS, FLOATS_OUT, NOTHING, loop

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def to_steps(x: Floats, ends: Floats, top: int) -> Bytes:
    """The nearest of the steps ``0 .. top`` between the ends, between which all of ``x`` lies."""
    codes = np.empty(x.size, np.uint8)
    half = np.float32(0.5)
    span = ends[1] * half - ends[0] * half  # of halves, as the whole may be out of range
    scale = np.float32(top) / (span if span > 0 else np.float32(1))
    _to_steps(x, ends[0] * half, scale, np.float32(top), codes)
    return codes


def from_steps(codes: Bytes, ends: Floats, top: int) -> Floats:
    """Decode steps."""
    found = np.empty(codes.size, np.float32)
    _from_steps(codes, ends[0], ends[1], np.float32(top), found)
    return found


@loop(NOTHING, FLOATS, FLOAT, FLOAT, FLOAT, BYTES_OUT)
def _to_steps(x: Any, low: Any, scale: Any, top: Any, codes: Any) -> None:
    half = np.float32(0.5)
    for i in range(x.size):
        step = (x[i] * half - low) * scale + half
        codes[i] = np.uint8(np.int32(min(step, top)))  # not negative, so that this rounds down


@loop(NOTHING, BYTES, FLOAT, FLOAT, FLOAT, FLOATS_OUT)
def _from_steps(codes: Any, low: Any, high: Any, top: Any, out: Any) -> None:
    for i in range(out.size):
        share = np.float32(codes[i]) / top
        out[i] = share * high + (np.float32(1) - share) * low
