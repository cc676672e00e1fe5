"""The 32-bit hash of `hvd_compress.ops`, in Triton."""

from __future__ import annotations

import numpy as np
import triton.language as tl

from hvd_compress.ops import KEY, MIX, second_key
from hvd_compress.ops.kernels.cuda.launching import part

_FIRST = tl.constexpr(MIX[0])
_SECOND = tl.constexpr(MIX[1])
_KEY = tl.constexpr(KEY)


def keys(seed: int) -> tuple[int, int]:
    """The two keys of a seed, as `hashed` takes them: int32, so that every seed finds the same compiled kernel."""
    return signed(seed), signed(second_key(seed))


def signed(x: int) -> int:
    """The int32 with the bits of a 32-bit unsigned number."""
    return int(np.uint32(x).view(np.int32))


@part
def bits_of(key: tl.tensor) -> tl.tensor:
    """The unsigned number with the bits of an int32."""
    return tl.cast(key, tl.int32).to(tl.uint32, bitcast=True)


@part
def hashed(indices: tl.tensor, first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """The hash of indices below 2**32, given both keys of the seed as uint32: uint32."""
    x = indices.to(tl.uint32) ^ first
    x ^= x >> 16
    x *= tl.cast(_FIRST, tl.uint32)
    x ^= x >> 15
    x += second
    x *= tl.cast(_SECOND, tl.uint32)
    return x ^ (x >> 16)


@part
def uniform(indices: tl.tensor, first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """``Ops.uniform``: float32 in [0, 1)."""
    return (hashed(indices, first, second) >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2**-24
