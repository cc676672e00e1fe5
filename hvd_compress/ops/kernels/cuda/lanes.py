"""Lanes of integers that are summed by an allreduce (see `hvd_compress.ops.lanes`)."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from hvd_compress.ops.coding import TINY
from hvd_compress.ops.kernels.cuda.hashing import bits_of, keys, uniform
from hvd_compress.ops.kernels.cuda.launching import flat, kernel, launch, part, tiles
from hvd_compress.ops.lanes import lanes_of

_TINY = tl.constexpr(TINY)
_SIZE = 512


@part
def _limits(limits: tl.tensor, index: tl.tensor, ok: tl.tensor, columns: tl.tensor, SAME: tl.constexpr) -> tl.tensor:
    """The limits of some coordinates."""
    if SAME:
        return tl.broadcast_to(tl.load(limits), index.shape)
    return tl.load(limits + index // columns, mask=ok, other=1.0)


@kernel("n", "columns", "length", "first", "second")
def _pack(
    rows: tl.tensor,
    limits: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    columns: tl.tensor,
    length: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    TOP: tl.constexpr,
    WIDTH: tl.constexpr,
    SAME: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    packed, first, second = tl.zeros([SIZE], tl.int32), bits_of(first), bits_of(second)
    top = tl.full([SIZE], TOP, tl.float32)
    for lane in tl.static_range(32 // WIDTH):
        index = place + lane * length.to(tl.int64)
        ok = (place < length) & (index < n)
        limit = _limits(limits, index, ok, columns, SAME)
        inverse = tl.div_rn(top, tl.where(limit > _TINY, limit, 1.0))
        x = tl.load(rows + index, mask=ok, other=0.0)
        y = tl.minimum(tl.maximum(x * inverse + uniform(index, first, second), -top), top)
        code = y.to(tl.int32)
        code -= (code.to(tl.float32) > y).to(tl.int32)  # the floor
        packed += tl.where(ok, code, 0) << WIDTH * lane
    tl.store(out + place, packed, mask=place < length)


@kernel("n", "columns", "length")
def _unpack(
    packed: tl.tensor,
    limits: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    columns: tl.tensor,
    length: tl.tensor,
    TOP: tl.constexpr,
    WIDTH: tl.constexpr,
    SAME: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    rest = tl.load(packed + place, mask=place < length, other=0)
    top = tl.full([SIZE], TOP, tl.float32)
    for lane in tl.static_range(32 // WIDTH):
        index = place + lane * length.to(tl.int64)
        ok = (place < length) & (index < n)
        digit = rest << 32 - WIDTH >> 32 - WIDTH  # with its sign
        step = tl.div_rn(_limits(limits, index, ok, columns, SAME), top)
        tl.store(out + index, digit.to(tl.float32) * step, mask=ok)
        if WIDTH < 32:
            rest = rest - digit >> WIDTH


def to_lanes(rows: Tensor, limits: Tensor, top: int, width: int, seed: int) -> Tensor:
    """See `Ops.to_lanes`."""
    x, columns = flat(rows), int(rows.shape[1])
    out = torch.empty(tiles(x.numel(), lanes_of(width)), dtype=torch.int32, device=x.device)
    args = (x, limits.contiguous(), out, x.numel(), columns, out.numel(), *keys(seed))
    _run(_pack, out.numel(), args, limits, top, width)
    return out


def from_lanes(packed: Tensor, limits: Tensor, top: int, width: int, rows: int, columns: int) -> Tensor:
    """See `Ops.from_lanes`; float32."""
    out = torch.empty((rows, columns), dtype=torch.float32, device=packed.device)
    args = (packed.contiguous(), limits.contiguous(), out, rows * columns, columns, packed.numel())
    _run(_unpack, packed.numel(), args, limits, top, width)
    return out


def _run(kernel: object, length: int, args: tuple[object, ...], limits: Tensor, top: int, width: int) -> None:
    same = limits.numel() == 1
    launch(kernel, tiles(length, _SIZE), *args, TOP=top, WIDTH=width, SAME=same, SIZE=_SIZE)
