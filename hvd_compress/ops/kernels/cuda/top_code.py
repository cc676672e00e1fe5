"""The largest coordinates of blocks, as `hvd_compress.ops.code.Record` lays them out."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hvd_compress.ops.code import Code
from hvd_compress.ops.kernels.cuda.launching import TILE, kernel, launch, part, tiles
from hvd_compress.ops.kernels.cuda.powers import nearest
from hvd_compress.ops.top_code import LARGEST_BFLOAT16, layout_of

_MOST = tl.constexpr(LARGEST_BFLOAT16)

_LARGEST = 8192
"""Coordinates of the largest block that a program can hold."""


def fits(code: Code) -> bool:
    """Return whether there are kernels for a code."""
    return code.kind != "top" or code.block <= _LARGEST


@part
def _largest(bits: tl.tensor, kept: tl.tensor) -> tl.tensor:
    """Return whether each magnitude is among the ``kept`` largest; ties go to the lower index."""
    least = tl.cast(0, tl.int32)
    for place in range(31):
        candidate = least | 1 << (30 - place)
        least = tl.where(tl.sum((bits >= candidate).to(tl.int32)) >= kept, candidate, least)
    more, same = bits > least, (bits == least).to(tl.int32)
    before = tl.cumsum(same, 0) - same
    return more | ((same > 0) & (before < kept - tl.sum(more.to(tl.int32))))


@part
def _mean(sizes: tl.tensor, members: tl.tensor) -> tl.tensor:
    number = tl.sum(members.to(tl.int32))
    return tl.sum(tl.where(members, sizes, 0.0)) / tl.maximum(number, 1).to(tl.float64)


@part
def _rounded(mean: tl.tensor) -> tl.tensor:
    return nearest(tl.minimum(mean.to(tl.float32), _MOST))


@kernel("n", "number", "size", "kept", "low", "highs")
def _encode(
    x: tl.tensor,
    error: tl.tensor,
    scales: tl.tensor,
    marks: tl.tensor,
    codes: tl.tensor,
    n: tl.tensor,
    number: tl.tensor,
    size: tl.tensor,
    kept: tl.tensor,
    low: tl.tensor,
    highs: tl.tensor,
    RETURN_ERROR: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    block, i = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    index = block * size + i
    ok = (i < size) & (index < n)
    p = tl.load(x + index, mask=ok, other=0.0)
    bits = tl.where(i < size, p.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)  # what fills up the last block is zero
    chosen = _largest(bits, kept)
    sizes = tl.abs(p).to(tl.float64)
    large = chosen & (sizes > _mean(sizes, chosen))
    above, below = _rounded(_mean(sizes, large)), _rounded(_mean(sizes, chosen & (large == 0)))
    tl.store(scales + block, (above >> 16).to(tl.uint16))
    tl.store(scales + number + block, (below >> 16).to(tl.uint16))
    order = tl.cumsum(chosen.to(tl.int32), 0) - 1
    code = (p < 0).to(tl.int32) | large.to(tl.int32) << 1 | (i & (1 << low) - 1) << 2
    tl.store(codes + block * kept + order, code, mask=chosen)
    tl.store(marks + block * highs + (i >> low) + order, 1, mask=chosen)
    if RETURN_ERROR:
        value = tl.where(large, above, below).to(tl.float32, bitcast=True)
        tl.store(error + index, p - tl.where(chosen, tl.where(p < 0, -value, value), 0.0), mask=ok)


@kernel("n", "width", "kept", "low", "highs")
def _pack(
    marks: tl.tensor,
    codes: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    width: tl.tensor,
    kept: tl.tensor,
    low: tl.tensor,
    highs: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    """Write the ``n`` bytes of all records, of ``width`` bytes each."""
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    block, byte = index // width, (index % width).to(tl.int32)
    merged = byte * 0
    for bit in tl.static_range(8):
        place = byte * 8 + bit
        mine = place - highs
        order = mine // (low + 2)
        mark = tl.load(marks + block * highs + place, mask=(index < n) & (mine < 0), other=0).to(tl.int32)
        code = tl.load(codes + block * kept + order, mask=(index < n) & (mine >= 0) & (order < kept), other=0)
        merged |= (mark | (code >> mine - order * (low + 2) & 1)) << bit
    tl.store(out + index, merged.to(tl.uint8), mask=index < n)


def encode_top(x: Tensor, error: Tensor, data: Tensor, code: Code, return_error: bool) -> None:
    """Write the payload of ``x`` to ``data``, and its error to ``error``, if asked to; it may be ``x``."""
    blocks, record = layout_of(code, x.numel())
    scales, records = data[: 4 * blocks.number].view(torch.uint16), data[4 * blocks.number :]
    marks = torch.zeros(blocks.number * record.highs, dtype=torch.uint8, device=x.device)
    codes = torch.empty(blocks.number * record.kept, dtype=torch.int32, device=x.device)
    room = triton.next_power_of_2(blocks.size)
    given = (x, error, scales, marks, codes, *blocks, *record)
    launch(_encode, blocks.number, *given, warps=max(1, room // 1024), RETURN_ERROR=return_error, SIZE=room)
    args = (marks, codes, records, records.numel(), record.size, *record)
    launch(_pack, tiles(records.numel()), *args, SIZE=TILE)


@part
def _field(record: tl.tensor, place: tl.tensor, bits: tl.tensor, ok: tl.tensor) -> tl.tensor:
    """Read up to 16 bits from a place on."""
    byte, shift = place >> 3, place & 7
    value = tl.load(record + byte, mask=ok, other=0).to(tl.int32)
    for more in tl.static_range(1, 3):
        there = ok & (shift + bits > 8 * more)
        value |= tl.load(record + byte + more, mask=there, other=0).to(tl.int32) << 8 * more
    return value >> shift & (1 << bits) - 1


@part
def _scale(scales: tl.tensor) -> tl.tensor:
    bits = tl.load(scales).to(tl.uint32) << 16 | tl.load(scales + 1).to(tl.uint32) << 24
    return bits.to(tl.float32, bitcast=True)


@kernel("rows", "length", "width", "n", "number", "size", "kept", "low", "highs")
def _decode(
    data: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    width: tl.tensor,
    n: tl.tensor,
    number: tl.tensor,
    size: tl.tensor,
    kept: tl.tensor,
    low: tl.tensor,
    highs: tl.tensor,
    JOIN: tl.constexpr,
    SIZE: tl.constexpr,
    HIGHS: tl.constexpr,
) -> None:
    block, i = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    place = tl.arange(0, HIGHS)
    out += block * size
    ok = (i < size) & (block * size + i < n)
    for row in range(rows):
        if JOIN or row == 0:
            tl.store(out + i, 0.0, mask=ok)
        tl.debug_barrier()  # what one thread has written, another one reads
        record = data + number.to(tl.int64) * 4 + block * width
        set_ = tl.load(record + (place >> 3), mask=place < highs, other=0).to(tl.int32) >> (place & 7) & 1
        order = tl.cumsum(set_, 0) - set_
        there = (set_ > 0) & (order < kept)
        code = _field(record, highs + order * (low + 2), low + 2, there)
        at = place - order << low | code >> 2
        there = there & (at < size) & (block * size + at < n)
        value = tl.where((code & 2) > 0, _scale(data + 2 * block), _scale(data + 2 * (number + block)))
        value = tl.where((code & 1) > 0, -value, value)
        tl.store(out + at, tl.load(out + at, mask=there, other=0.0) + value, mask=there)
        tl.debug_barrier()
        data += length
        if JOIN:
            out += n


def decode_top(rows: Tensor, out: Tensor, code: Code, n: int, join: bool) -> None:
    """Write the sum of some payloads to ``out``, or, with ``join``, one after another."""
    blocks, record = layout_of(code, n)
    args = (rows, out, rows.shape[0], rows.shape[1], record.size, *blocks, *record)
    room, highs = triton.next_power_of_2(blocks.size), triton.next_power_of_2(record.highs)
    warps = max(1, max(room, highs) // 1024)
    launch(_decode, blocks.number, *args, warps=warps, JOIN=join, SIZE=room, HIGHS=highs)
