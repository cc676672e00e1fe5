"""Narrower floats and back: to the nearest, half-way to even, and inf beyond their range."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from hvd_compress.ops.kernels.cuda.launching import TILE, flat, kernel, launch, tiles
from hvd_compress.ops.kernels.cuda.powers import nearest


@kernel("n")
def _cast(x: tl.tensor, out: tl.tensor, n: tl.tensor, SIZE: tl.constexpr) -> None:
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    tl.store(out + index, tl.load(x + index, mask=index < n).to(out.dtype.element_ty), mask=index < n)


@kernel("n")
def _to_bfloat16(x: tl.tensor, out: tl.tensor, n: tl.tensor, SIZE: tl.constexpr) -> None:
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    bits = nearest(tl.load(x + index, mask=index < n, other=0.0)) >> 16
    tl.store(out + index, bits.to(tl.uint16), mask=index < n)


@kernel("n")
def _from_bfloat16(x: tl.tensor, out: tl.tensor, n: tl.tensor, SIZE: tl.constexpr) -> None:
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    bits = tl.load(x + index, mask=index < n, other=0).to(tl.uint32) << 16
    tl.store(out + index, bits.to(tl.float32, bitcast=True), mask=index < n)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 to float16 or back."""
    return _run(_cast, x, dtype)


def to_bfloat16(x: Tensor) -> Tensor:
    """See `Ops.to_bfloat16`."""
    return _run(_to_bfloat16, x, torch.uint16)


def from_bfloat16(x: Tensor) -> Tensor:
    """See `Ops.from_bfloat16`."""
    return _run(_from_bfloat16, x, torch.float32)


def _run(kernel: object, x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    launch(kernel, tiles(x.numel()), flat(x), out, x.numel(), SIZE=TILE)
    return out
