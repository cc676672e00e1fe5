"""The hash that makes random numbers, as in `hvd_compress.ops.numpy`."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_compress.ops import MIX
from hvd_compress.ops.kernels.cpu.compiled import part

_FIRST, _SECOND = (np.uint32(factor) for factor in MIX)

UNIT = np.float32(2**-24)
"""Between neighbouring random numbers."""


@part
def scrambled(index: Any, seed: Any, key: Any) -> Any:
    """The hash of an index, all uint32."""
    x = np.uint32(index ^ seed)
    x = np.uint32(x ^ (x >> np.uint32(16)))
    x = np.uint32(x * _FIRST)
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x + key)
    x = np.uint32(x * _SECOND)
    return np.uint32(x ^ (x >> np.uint32(16)))


@part
def coin(start: Any, i: Any, seed: Any, key: Any) -> Any:
    """Return the number of `Ops.uniform` for the index ``start + i``, in units of `UNIT`."""
    x = scrambled(np.uint32(start + np.uint32(i)), seed, key)
    return np.float32(np.int32(x >> np.uint32(8)))
