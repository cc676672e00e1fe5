"""Coordinates one by one: momentum, scatter-add, and the copy that looks for what is not finite."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from hvd_compress.ops.kernels.cuda.launching import TILE, flat, kernel, launch, tiles

_NAN = tl.constexpr(0x7FC00000)
"""Bits of a float32 that is not a number."""


@kernel("n", "momentum")
def _accelerate(
    x: tl.tensor,
    velocity: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    momentum: tl.tensor,
    NESTEROV: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    ok = index < n
    g, v = tl.load(x + index, mask=ok), tl.load(velocity + index, mask=ok)
    r = tl.load(residual + index, mask=ok)
    if NESTEROV:
        v = (v + g) * momentum
        r = r + v + g
    else:
        v = v * momentum + g
        r = r + v
    tl.store(out + index, v, mask=ok)
    tl.store(x + index, r, mask=ok)


@kernel("n")
def _add_at(x: tl.tensor, indices: tl.tensor, values: tl.tensor, n: tl.tensor, SIZE: tl.constexpr) -> None:
    slot = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    ok = slot < n
    place = x + tl.load(indices + slot, mask=ok, other=0)
    tl.store(place, tl.load(place, mask=ok) + tl.load(values + slot, mask=ok), mask=ok)


@kernel("n")
def _put(
    out: tl.tensor,
    bad: tl.tensor,
    x: tl.tensor,
    residual: tl.tensor,
    n: tl.tensor,
    ADD: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    ok = index < n
    v = tl.load(x + index, mask=ok, other=0.0).to(tl.float32)
    infinite = tl.where(v.to(tl.int32, bitcast=True) & 0x7F800000 == 0x7F800000, _NAN, 0)
    if ADD:
        v += tl.load(residual + index, mask=ok, other=0.0)
    tl.store(out + index, v, mask=ok)
    found = tl.max(infinite)
    tl.atomic_or(bad, found, mask=found > 0)


@kernel("n")
def _clear(out: tl.tensor, bad: tl.tensor, n: tl.tensor, SIZE: tl.constexpr) -> None:
    """Set all to zero, if anything was bad."""
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    tl.store(out + index, tl.zeros([SIZE], tl.float32), mask=(index < n) & (tl.load(bad) > 0))


def accelerate(x: Tensor, velocity: Tensor, residual: Tensor, momentum: float, nesterov: bool) -> tuple[Tensor, Tensor]:
    """See `Ops.accelerate`; what has piled up is written over ``x``."""
    x, out = flat(x), torch.empty_like(velocity)
    args = (x, flat(velocity), flat(residual), out, x.numel(), float(momentum))
    launch(_accelerate, tiles(x.numel()), *args, NESTEROV=nesterov, SIZE=TILE)
    return out, x


def add_at(x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """See `Ops.add_at`, for one dimension; overwrites ``x``. As indices differ, no addition has to be atomic."""
    launch(_add_at, tiles(indices.numel()), x, flat(indices), flat(values), indices.numel(), SIZE=TILE)
    return x


def put_finite(out: Tensor, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """Copy ``x`` to float32, or only zeros if it is not finite everywhere; the host does not wait for the device.

    Args:
        out: Where to; one after another in memory.
        x: float32, float16 or bfloat16.
        residual: Added to it; not looked at.

    Returns:
        0 if all of ``x`` is finite, else nan: a float32 scalar on the device.
    """
    x, n = flat(x), x.numel()
    bad = torch.zeros((), dtype=torch.int32, device=x.device)
    add = x if residual is None else flat(residual)
    launch(_put, tiles(n), out, bad, x, add, n, ADD=residual is not None, SIZE=TILE)
    launch(_clear, tiles(n), out, bad, n, SIZE=TILE)
    return bad.view(torch.float32)
