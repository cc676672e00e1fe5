"""float32 as bfloat16, and back, with the bits of the oracle."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_compress.ops.kernels.cpu.bits import bits_of, float_of
from hvd_compress.ops.kernels.cpu.compiled import FLOATS_OUT, NOTHING, SHORTS, loop, part

Floats: TypeAlias = npt.NDArray[np.float32]
Shorts: TypeAlias = npt.NDArray[np.uint16]


def from_bfloat16(x: Shorts) -> Floats:
    """Return bfloat16, given as bits, as float32."""
    found = np.empty(x.shape, np.float32)
    _from_bfloat16(x, found)
    return found


@part
def narrowed(x: Any) -> Any:
    """Return the bits of the nearest bfloat16."""
    bits = bits_of(x)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd) >> np.uint32(16))


@part
def widened(x: Any) -> Any:
    """Undo `narrowed`."""
    return float_of(np.uint32(np.uint32(x) << np.uint32(16)))


@loop(NOTHING, SHORTS, FLOATS_OUT)
def _from_bfloat16(x: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = widened(x[i])
