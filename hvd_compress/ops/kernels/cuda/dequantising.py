"""Codes of a few bits: unpack, scale and add up in one pass over the output."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from hvd_compress.errors import ExchangeError
from hvd_compress.ops import wrong_length
from hvd_compress.ops.blocks import Blocks
from hvd_compress.ops.code import Code
from hvd_compress.ops.kernels.cuda.codes import load_codes
from hvd_compress.ops.kernels.cuda.float8 import from_float8
from hvd_compress.ops.kernels.cuda.launching import TILE, kernel, launch, part, tiles
from hvd_compress.ops.kernels.cuda.powers import power
from hvd_compress.ops.kernels.cuda.top_code import decode_top


@part
def _value(
    row: tl.tensor,
    steps: tl.tensor,
    index: tl.tensor,
    block: tl.tensor,
    ok: tl.tensor,
    n: tl.tensor,
    number: tl.tensor,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr,
) -> tl.tensor:
    """Decode some coordinates of one row."""
    if KIND == "powers":
        return power(tl.load(row + 1 + index, mask=ok, other=0).to(tl.int32), tl.load(row).to(tl.int32))
    elif KIND == "bfloat16":
        low = tl.load(row + 2 * index, mask=ok, other=0).to(tl.uint32)
        high = tl.load(row + 2 * index + 1, mask=ok, other=0).to(tl.uint32)
        return (low << 16 | high << 24).to(tl.float32, bitcast=True)
    else:
        codes = load_codes(row, index, n, ok, BITS)
        if KIND == "one":
            return codes.to(tl.float32) * 2 - 1
        above = tl.load(steps + block, mask=ok, other=0.0)
        if KIND == "mean":
            return tl.where(codes > 0, above, -above)
        elif KIND == "means":
            return tl.where(codes > 0, above, tl.load(steps + number + block, mask=ok, other=0.0))
        elif MANTISSA:
            return from_float8(codes, MANTISSA, SMALLEST) * above
        else:
            TOP: tl.constexpr = 2 ** (BITS - 1) - 1
            return (codes - TOP).to(tl.float32) * above


@kernel("rows", "width", "n", "number", "size", "scales", "header")
def _decode(
    data: tl.tensor,
    steps: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    n: tl.tensor,
    number: tl.tensor,
    size: tl.tensor,
    scales: tl.tensor,
    header: tl.tensor,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr,
    JOIN: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    n = n.to(tl.int64)
    start = tl.program_id(0).to(tl.int64) * SIZE
    inside = tl.arange(0, SIZE)
    index = start + inside
    ok = index < n
    block = start // size + (inside + start % size).to(size.dtype) // size
    total = tl.full([SIZE], -0.0, tl.float32)  # which changes nothing when it is added to
    data += header
    for _ in range(rows):
        value = _value(data, steps, index, block, ok, n, number, KIND, BITS, MANTISSA, SMALLEST)
        data, steps = data + width, steps + scales
        if JOIN:
            tl.store(out + index, value, mask=ok)
            out += n
        else:
            total += value
    if not JOIN:
        tl.store(out + index, total, mask=ok)


def dequantise(rows: Tensor, code: Code, n: int, join: bool = False) -> Tensor:
    """See `Ops.dequantise`; float32.

    Raises:
        ExchangeError: If the rows are longer or shorter than they should be.
    """
    if rows.shape[1] != code.size(n, "float32"):
        raise ExchangeError(wrong_length(rows.shape[1], code.size(n, "float32")))
    rows, number = rows.contiguous(), int(rows.shape[0])
    out = torch.empty(number * n if join else n, dtype=torch.float32, device=rows.device)
    if code.kind == "top":
        decode_top(rows, out, code, n, join)
        return out
    blocks, header, steps = Blocks.of(n, code.block), 0, out
    if n and code.scales:
        header = 4 * code.scales * blocks.number
        # cloned: in a row, numbers of four bytes may lie at any place
        steps = rows[:, :header].clone(memory_format=torch.contiguous_format).view(torch.float32)
        if code.bits > 1:
            steps = steps / torch.full_like(steps[:1, :1], code.top)  # a number would be inverted and multiplied by
    args = (rows, steps, out, number, rows.shape[1], *blocks, code.scales * blocks.number, header)
    mantissa, smallest = code.float8 or (0, 0)
    form = {"BITS": code.bits, "MANTISSA": mantissa, "SMALLEST": smallest}
    launch(_decode, tiles(n), *args, KIND=code.kind, **form, JOIN=join, SIZE=TILE)
    return out
