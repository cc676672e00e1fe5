"""Powers of two and bfloat16: round, and return the error."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from hvd_compress.ops.coding import EXPONENTS
from hvd_compress.ops.kernels.cuda.hashing import bits_of, keys, uniform
from hvd_compress.ops.kernels.cuda.launching import TILE, kernel, launch, part, tiles

_EXPONENTS = tl.constexpr(EXPONENTS)


@part
def nearest(x: tl.tensor) -> tl.tensor:
    """The bits of the nearest bfloat16 of float32 numbers, half-way to even, in the upper half of a uint32."""
    bits = x.to(tl.uint32, bitcast=True)
    return (bits + 0x7FFF + (bits >> 16 & 1)) & tl.cast(0xFFFF0000, tl.uint32)


@part
def power(codes: tl.tensor, top: tl.tensor) -> tl.tensor:
    """Decode powers of two: float32."""
    below = codes % (_EXPONENTS + 1)
    exponents = tl.minimum(tl.maximum(below + top - _EXPONENTS, 0), 254)
    magnitude = (exponents << 23).to(tl.float32, bitcast=True)
    return tl.where(below > 0, tl.where(codes > _EXPONENTS, -magnitude, magnitude), 0.0)


@part
def _rounded(p: tl.tensor, index: tl.tensor, first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Exponents, rounded up or down at random."""
    bits = tl.abs(p).to(tl.int32, bitcast=True)
    exponents, mantissas = bits >> 23, (bits & 0x7FFFFF).to(tl.float32)
    up = (uniform(index, first, second) * 8388608.0 < mantissas).to(tl.int32)
    return tl.minimum(tl.where(exponents > 0, exponents + up, 0), 254)


@kernel("n", "first", "second")
def _peaks(
    x: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    p = tl.load(x + index, mask=index < n, other=0.0)
    tl.atomic_max(out, tl.max(_rounded(p, index, bits_of(first), bits_of(second))))


@kernel("n", "first", "second")
def _powers(
    x: tl.tensor,
    error: tl.tensor,
    data: tl.tensor,
    largest: tl.tensor,
    n: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    RETURN_ERROR: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    ok, top = index < n, tl.load(largest)
    p = tl.load(x + index, mask=ok, other=0.0)
    codes = tl.maximum(_rounded(p, index, bits_of(first), bits_of(second)) - top + _EXPONENTS, 0)
    codes += (p < 0).to(tl.int32) * (_EXPONENTS + 1)
    tl.store(data + 1 + index, codes.to(tl.uint8), mask=ok)
    if RETURN_ERROR:
        tl.store(error + index, p - power(codes, top), mask=ok)


@kernel("n")
def _bfloat16(
    x: tl.tensor,
    error: tl.tensor,
    data: tl.tensor,
    n: tl.tensor,
    RETURN_ERROR: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    ok = index < n
    p = tl.load(x + index, mask=ok, other=0.0)
    bits = nearest(p)
    tl.store(data + index, (bits >> 16).to(tl.uint16), mask=ok)
    if RETURN_ERROR:
        tl.store(error + index, p - bits.to(tl.float32, bitcast=True), mask=ok)


def encode_powers(x: Tensor, error: Tensor, data: Tensor, seed: int, return_error: bool) -> None:
    """Write the codes of ``x`` to ``data``, behind the largest exponent, and the error to ``error``."""
    n = x.numel()
    top = torch.zeros(1, dtype=torch.int32, device=x.device)
    launch(_peaks, tiles(n), x, top, n, *keys(seed), SIZE=TILE)
    launch(_powers, tiles(n), x, error, data, top, n, *keys(seed), RETURN_ERROR=return_error, SIZE=TILE)
    data[:1].copy_(top)


def encode_bfloat16(x: Tensor, error: Tensor, data: Tensor, seed: int, return_error: bool) -> None:
    """Write the nearest bfloat16 of ``x`` to ``data``, and the error to ``error``."""
    n = x.numel()
    launch(_bfloat16, tiles(n), x, error, data.view(torch.uint16), n, RETURN_ERROR=return_error, SIZE=TILE)
