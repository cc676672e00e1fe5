"""Randomised Hadamard rotations: a transform of every block in registers, signs on the way in or out."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hvd_compress.ops.kernels.cuda.hashing import bits_of, hashed, keys
from hvd_compress.ops.kernels.cuda.launching import flat, kernel, launch, part, tiles, warps_for

_TILE = 4096
"""Coordinates of a program, and the largest block that takes one pass over memory."""

_RADIX = 128
"""Rows that each further pass transforms: 128 bytes of each are read at once."""


@part
def _signed(x: tl.tensor, index: tl.tensor, first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Flip the signs where `uniform` is not below 1/2: where the hash has its highest bit."""
    sign = hashed(index, bits_of(first), bits_of(second)) & tl.cast(0x80000000, tl.uint32)
    return (x.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@part
def _butterfly(x: tl.tensor, TILE: tl.constexpr, HALF: tl.constexpr) -> tl.tensor:
    """Replace the pairs that are HALF apart by their sum and difference."""
    pairs = tl.permute(tl.reshape(x, [TILE // (2 * HALF), 2, HALF]), (0, 2, 1))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [TILE])


@kernel("n", "size", "stride", "first", "second", "scale")
def _transform(
    x: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    scale: tl.tensor,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Transform ``2**BITS`` rows that are ``stride`` apart, COLUMNS at a time; elements from ``n`` on are zero."""
    program, slot = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    if COLUMNS == 1:  # rows of one element lie one after another
        index = program * TILE + slot
    else:
        tiles = stride // COLUMNS
        start = (program // tiles * stride << BITS) + program % tiles * COLUMNS
        index = start + (slot // COLUMNS).to(tl.int64) * stride + slot % COLUMNS
    v = tl.load(x + index, mask=index < n, other=0.0) * scale  # now, so that no sum leaves the range
    if BEFORE:
        v = _signed(v, index, first, second)
    for bit in tl.static_range(BITS):
        v = _butterfly(v, TILE, COLUMNS << bit)
    if AFTER:
        v = _signed(v, index, first, second)
    tl.store(out + index, v, mask=index < size)


def rotate(x: Tensor, seed: int, block: int) -> Tensor:
    """See `Ops.rotate`."""
    x = flat(x)
    blocks = tiles(x.numel(), block)
    out = torch.empty(blocks * block, dtype=torch.float32, device=x.device)
    return _hadamard(x, out, seed, block, before=True).reshape(blocks, block)


def unrotate(rows: Tensor, seed: int) -> Tensor:
    """See `Ops.unrotate`; overwrites ``rows``."""
    x = flat(rows)
    return _hadamard(x, x, seed, int(rows.shape[1]), before=False)


def _hadamard(x: Tensor, out: Tensor, seed: int, block: int, before: bool) -> Tensor:
    """Transform blocks, in one pass or, if they are larger than a tile, in several, of which the first reads ``x``."""
    stride, source, size = 1, x, out.numel()
    while True:
        radix = min(_TILE if stride == 1 else _RADIX, block // stride)
        tile = min(_TILE, triton.next_power_of_2(max(1, size))) if stride == 1 else _TILE
        last = stride * radix == block
        launch(
            _transform,
            tiles(size, tile),
            source,
            out,
            source.numel(),
            size,
            stride,
            *keys(seed),
            radix**-0.5,
            warps=warps_for(tile),
            BEFORE=before and stride == 1,
            AFTER=last and not before,
            BITS=radix.bit_length() - 1,
            COLUMNS=1 if stride == 1 else _TILE // radix,
            TILE=tile,
        )
        stride, source = stride * radix, out
        if last:
            return out
