"""Elementwise steps that would take several passes over memory otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.ops import second_key
from hvd_compress.ops.kernels.cpu.compiled import FLOAT, FLOATS, FLOATS_OUT, NOTHING, WORD, loop
from hvd_compress.ops.kernels.cpu.noise import scrambled

Floats = npt.NDArray[np.float32]


def blend(x: Floats, y: Floats, share: float, out: Floats) -> Floats:
    """Write ``x * share + y * (1 - share)`` to ``out``, which may be one of the others."""
    _blend(x, y, np.float32(share), np.float32(1 - share), out)
    return out


def majority(count: Floats, seed: int, size: float, out: Floats) -> Floats:
    """Write the signs of counts times ``size`` to ``out``, as `Ops.majority` gives; ``out`` may be ``count``."""
    _majority(count, np.uint32(seed), np.uint32(second_key(seed)), np.float32(size), out)
    return out


@loop(NOTHING, FLOATS, FLOATS, FLOAT, FLOAT, FLOATS_OUT)
def _blend(x: Any, y: Any, share: Any, rest: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = x[i] * share + y[i] * rest


@loop(NOTHING, FLOATS, WORD, WORD, FLOAT, FLOATS_OUT)
def _majority(count: Any, seed: Any, key: Any, size: Any, out: Any) -> None:
    half = np.uint32(0x80000000)
    for i in range(out.size):
        tails = scrambled(np.uint32(i), seed, key) < half
        vote = count[i] + (np.float32(-0.5) if tails else np.float32(0.5))
        out[i] = size if vote > np.float32(0) else -size
