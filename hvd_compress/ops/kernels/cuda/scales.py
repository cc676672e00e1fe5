"""Sums over blocks that a program cannot hold, as partial sums in float64: their squares stay in range."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hvd_compress.ops.blocks import Blocks
from hvd_compress.ops.code import Code
from hvd_compress.ops.kernels.cuda.launching import kernel, launch, tiles, warps_for

_TILE = 4096


@kernel("n", "number", "size", "parts")
def _partials(
    x: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    number: tl.tensor,
    size: tl.tensor,
    parts: tl.tensor,
    SIGNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    part = program % parts
    row = (program // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = part * WIDTH + tl.arange(0, WIDTH)
    index = row[:, None] * size + column[None, :]
    ok = (column < size)[None, :] & (index < n)
    p = tl.load(x + index, mask=ok, other=0.0)
    place, inside = out + row * parts + part, row < number
    step = number.to(tl.int64) * parts
    exact = p.to(tl.float64)
    if SIGNS:
        up = p >= 0
        tl.store(place, tl.sum(tl.where(up, exact, 0.0), 1), mask=inside)
        tl.store(place + step, tl.sum(tl.where(up, 0.0, exact), 1), mask=inside)
        tl.store(place + 2 * step, tl.sum((up & ok).to(tl.float64), 1), mask=inside)
    else:
        tl.store(place, tl.max(tl.abs(p), 1).to(tl.float64), mask=inside)
        tl.store(place + step, tl.sum(exact * exact, 1), mask=inside)


def _sums(x: Tensor, blocks: Blocks, signs: bool) -> Tensor:
    """Partial results for each block: float64, shape (2 or 3, blocks, parts)."""
    width = min(_TILE, triton.next_power_of_2(blocks.size))
    rows, parts = _TILE // width, tiles(blocks.size, width)
    out = torch.empty((3 if signs else 2, blocks.number, parts), dtype=torch.float64, device=x.device)
    args = (x, out, *blocks, parts)
    constants = {"SIGNS": signs, "ROWS": rows, "WIDTH": width}
    launch(_partials, tiles(blocks.number, rows) * parts, *args, warps=warps_for(_TILE), **constants)
    return out


def scales(x: Tensor, code: Code, blocks: Blocks) -> Tensor:
    """Return the scales of all blocks: float32, shape (scales, blocks)."""
    if code.kind == "one":
        return torch.empty((0, blocks.number), dtype=torch.float32, device=x.device)
    starts = torch.arange(blocks.number, device=x.device, dtype=torch.float64) * blocks.size
    members = (blocks.n - starts).clamp_(1, blocks.size)
    found = _sign_scales if code.kind in ("mean", "means") else _level_scales
    return found(_sums(x, blocks, code.bits == 1), members, code).to(torch.float32)


def _sign_scales(sums: Tensor, members: Tensor, code: Code) -> Tensor:
    above, below, ups = sums.sum(-1).unbind()
    if code.kind == "mean":
        return ((above - below) / members)[None]
    return torch.stack([above / ups.clamp(min=1), below / (members - ups).clamp_(min=1)])


def _level_scales(sums: Tensor, members: Tensor, code: Code) -> Tensor:
    peaks, squares = sums[0].amax(-1), sums[1].sum(-1)
    if code.kind == "l2":
        return squares.sqrt_()[None]
    if code.kind == "clipped" and code.clip:
        return torch.minimum(peaks, code.clip * (squares / members).sqrt_())[None]
    return peaks[None]


def norms(rows: Tensor) -> Tensor:
    """See `Ops.norms`."""
    number, size = rows.shape
    if not size:
        return torch.zeros(number, dtype=torch.float32, device=rows.device)
    x = rows.contiguous().reshape(-1)
    return _sums(x, Blocks(x.numel(), number, size), False)[1].sum(-1).sqrt_().to(torch.float32)
