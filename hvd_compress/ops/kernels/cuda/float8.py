"""8-bit floats: round and decode."""

from __future__ import annotations

import triton.language as tl

from hvd_compress.ops.code import LARGEST
from hvd_compress.ops.coding import TINY, UNITS
from hvd_compress.ops.kernels.cuda.hashing import uniform
from hvd_compress.ops.kernels.cuda.launching import part

_TINY = tl.constexpr(TINY)
_LARGEST = tl.constexpr(LARGEST)
_UNITS = tl.constexpr(UNITS)


@part
def _power(exponent: tl.tensor) -> tl.tensor:
    """Return the power of two with an exponent in the bits of a float32."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@part
def from_float8(codes: tl.tensor, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr) -> tl.tensor:
    """Return what codes (int32) stand for: float32."""
    below = codes & 127
    exponent = tl.maximum(below >> MANTISSA, 1) - 1
    magnitude = (below - (exponent << MANTISSA)).to(tl.float32) * _power(exponent + (SMALLEST - MANTISSA))
    return tl.where(codes > 127, -magnitude, magnitude)


@part
def to_float8(
    p: tl.tensor,
    index: tl.tensor,
    scale: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr,
    DITHER: tl.constexpr,
) -> tl.tensor:
    """Return codes (int32), and what they stand for."""
    top = tl.full(scale.shape, _LARGEST, tl.float32)
    y = p * tl.div_rn(top, tl.where(scale > _TINY, scale, 1.0))
    size = tl.minimum(tl.abs(y), _LARGEST)
    exponent = tl.maximum(size.to(tl.int32, bitcast=True) >> 23, SMALLEST)
    scaled = size * _power((254 + MANTISSA) - exponent)  # in units of the last place
    if DITHER:
        units = scaled.to(tl.int32)
        units += (uniform(index, first, second) < scaled - units.to(tl.float32)).to(tl.int32)
    else:
        units = (scaled + _UNITS).to(tl.int32, bitcast=True) & (_UNITS - 1)
    codes = units + ((exponent - SMALLEST) << MANTISSA) + (y.to(tl.int32, bitcast=True) < 0).to(tl.int32) * 128
    return codes, from_float8(codes, MANTISSA, SMALLEST) * tl.div_rn(scale, top)
