"""Count-sketches of sparse arrays (see `hvd_compress.methods.homomorphic`), as sums of integers: exact in any order."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from hvd_compress.ops.kernels.cuda.hashing import hashed, mixed
from hvd_compress.ops.kernels.cuda.launching import TILE, flat, kernel, launch, part, tiles

_KEEPS = tl.constexpr(1.5 * 2**52)
"""Added to a float64 below 2**51 in magnitude and subtracted again, this rounds it to an integer, half-way to even."""


@part
def _power_of_two(exponent: tl.tensor) -> tl.tensor:
    """``2**exponent`` in float64, in its normal range."""
    return (exponent.to(tl.int64) + 1023 << 52).to(tl.float64, bitcast=True)


@part
def _integers(x: tl.tensor, peak: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """``x`` in units of ``2**(e - BITS)``, where e is the exponent that frexp gives for the peak: int64."""
    exact = peak.to(tl.float64)
    exponent = (exact.to(tl.int64, bitcast=True) >> 52 & 0x7FF) - 1022
    value = x.to(tl.float64) * _power_of_two(BITS - tl.where(exact > 0, exponent, 0))
    near = value + _KEEPS - _KEEPS
    return tl.where(tl.abs(value) < 2251799813685248.0, near, value).to(tl.int64)  # 2**51


@kernel("n", "table")
def _write(
    union: tl.tensor,
    key: tl.tensor,
    peak: tl.tensor,
    x: tl.tensor,
    sums: tl.tensor,
    n: tl.tensor,
    table: tl.tensor,
    BITS: tl.constexpr,
    HASHES: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    ok = (index < n) & (tl.load(union + index, mask=index < n, other=0) != 0)
    values = _integers(tl.load(x + index, mask=ok, other=0.0), tl.load(peak), BITS)
    base = mixed(tl.full([], 0, tl.uint32), tl.load(key).to(tl.uint32))
    for number in tl.static_range(HASHES):
        seed = mixed(base, tl.full([], number, tl.uint32))
        hashes = hashed(index, seed, mixed(seed, tl.full([], 0, tl.uint32))).to(tl.int64)
        tl.atomic_add(sums + (hashes * table >> 32) + number * table, values, mask=ok)


def write_sketch(union: Tensor, key: Tensor, peak: Tensor, x: Tensor, table: int, bits: int, hashes: int) -> Tensor:
    """The sketch of an array; the host does not wait for the device.

    Args:
        union: uint8, not zero at the coordinates to be written.
        key: Of the hashes: int64, shape (1,).
        peak: The largest magnitude on any rank: float32, shape (1,).
        x: float32, shape ``(n,)``.
        table: Cells in each table.
        bits: A value is an integer of at most ``2**bits``.
        hashes: Tables.

    Returns:
        int64, shape ``(hashes * table,)``.
    """
    sums = torch.zeros(hashes * table, dtype=torch.int64, device=x.device)
    args = (flat(union), key, peak, flat(x), sums, x.numel(), table)
    launch(_write, tiles(x.numel()), *args, BITS=bits, HASHES=hashes, SIZE=TILE)
    return sums
