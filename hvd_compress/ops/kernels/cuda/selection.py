"""Select coordinates: exact top-k without a synchronisation, and all that reach a threshold."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from hvd_compress.ops.kernels.cuda.launching import TILE, flat, kernel, launch, part, tiles, warps_for

_DIGITS = ((23, 8), (15, 8), (7, 8), (0, 7))
"""The bits of a magnitude from the top down, as numbers: their lowest bit, and how many bits.

Fewer passes over memory with longer digits would take longer: the work of `tl.histogram` grows with its bins.
"""

_PROGRAMS, _LONG = 1024, 4096
"""Programs of a histogram, each of which adds up many tiles of this length before it tells the others."""


@part
def _magnitudes(x: tl.tensor, index: tl.tensor, n: tl.tensor) -> tl.tensor:
    """The bits of magnitudes as int32, which are in the order of these; -1 behind the end."""
    bits = tl.load(x + index, mask=index < n, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(index < n, bits, -1)


@kernel("n", "programs")
def _histogram(
    x: tl.tensor,
    counts: tl.tensor,
    prefix: tl.tensor,
    n: tl.tensor,
    programs: tl.tensor,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Count the digits of the magnitudes that begin with a prefix."""
    bins = tl.arange(0, 1 << BITS)
    total = tl.zeros([1 << BITS], tl.int32)
    wanted = tl.load(prefix)
    for start in range(tl.program_id(0).to(tl.int64) * SIZE, n, programs.to(tl.int64) * SIZE):
        bits = _magnitudes(x, start + tl.arange(0, SIZE), n)
        mine = (bits >= 0) & (bits >> SHIFT + BITS == wanted)
        total += tl.histogram(bits >> SHIFT & (1 << BITS) - 1, 1 << BITS, mask=mine)
    tl.atomic_add(counts + bins, total, mask=total > 0)


@kernel("n")
def _count(
    x: tl.tensor, least: tl.tensor, above: tl.tensor, equal: tl.tensor, n: tl.tensor, SIZE: tl.constexpr
) -> None:
    program = tl.program_id(0)
    bits, limit = _magnitudes(x, program.to(tl.int64) * SIZE + tl.arange(0, SIZE), n), tl.load(least)
    tl.store(above + program, tl.sum((bits > limit).to(tl.int32)))
    tl.store(equal + program, tl.sum((bits == limit).to(tl.int32)))


@kernel("n")
def _compact(
    x: tl.tensor,
    least: tl.tensor,
    ties: tl.tensor,
    above: tl.tensor,
    equal: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    """Write the indices of what is above a limit, and of as many as wanted that are equal to it."""
    program, slot = tl.program_id(0), tl.arange(0, SIZE)
    index = program.to(tl.int64) * SIZE + slot
    bits, limit, wanted = _magnitudes(x, index, n), tl.load(least), tl.load(ties)
    more, same = (bits > limit).to(tl.int32), (bits == limit).to(tl.int32)
    before = tl.load(above + program) + tl.cumsum(more, 0) - more
    alike = tl.load(equal + program) + tl.cumsum(same, 0) - same
    chosen = (more > 0) | ((same > 0) & (alike < wanted))
    tl.store(out + before + tl.minimum(alike, wanted), index, mask=chosen)


def top_indices(x: Tensor, k: int) -> Tensor:
    """See `Ops.top_indices`. The host does not wait for the device."""
    x = flat(x)
    out = torch.empty(k, dtype=torch.int64, device=x.device)
    if k == x.numel():
        return torch.arange(k, device=x.device, out=out)
    if k:
        least, ties = _kth(x, k)
        above, equal = _counted(x, least)
        args = (x, least, ties, _before(above), _before(equal), out, x.numel())
        launch(_compact, tiles(x.numel()), *args, SIZE=TILE)
    return out


def kth_magnitude(x: Tensor, k: int) -> Tensor:
    """See `Ops.kth_magnitude`. The host does not wait for the device."""
    return _kth(flat(x), k)[0].view(torch.float32)[0]


def above(x: Tensor, threshold: Any) -> Tensor:
    """See `Ops.above`. The host has to wait: only the device knows how many there are."""
    x = flat(x)
    limit = torch.as_tensor(threshold, dtype=torch.float32, device=x.device).reshape(1)
    # the largest magnitude below; -1 where there is none
    least = torch.where(limit > 0, limit.view(torch.int32) - 1, -1)
    more, _ = _counted(x, least)
    places = _before(more)
    out = torch.empty(int(more.sum()), dtype=torch.int64, device=x.device)
    none = torch.zeros_like(places)
    launch(_compact, tiles(x.numel()), x, least, none[:1], places, none, out, x.numel(), SIZE=TILE)
    return out


def _kth(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The bits of the k-th largest magnitude, and how many of its equals are among the k largest: shape (1,) each."""
    prefix, left = (torch.full((1,), value, dtype=torch.int32, device=x.device) for value in (0, k))
    programs = min(_PROGRAMS, tiles(x.numel(), _LONG))
    for shift, bits in _DIGITS:
        counts = torch.zeros(1 << bits, dtype=torch.int32, device=x.device)
        args = (x, counts, prefix, x.numel(), programs)
        launch(_histogram, programs, *args, warps=warps_for(_LONG), SHIFT=shift, BITS=bits, SIZE=_LONG)
        reached = counts.flip(0).cumsum(0, dtype=torch.int32).flip(0)  # how many have this digit or a larger one
        digit = (reached[1:] >= left).sum(dtype=torch.int32).reshape(1)
        larger = (reached - counts).index_select(0, digit)
        prefix, left = prefix << bits | digit, left - larger
    return prefix, left


def _counted(x: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Count the magnitudes above a limit and equal to it, per tile: int32."""
    above, equal = torch.empty((2, tiles(x.numel())), dtype=torch.int32, device=x.device)
    launch(_count, tiles(x.numel()), x, least, above, equal, x.numel(), SIZE=TILE)
    return above, equal


def _before(counts: Tensor) -> Tensor:
    """Return the sum over all previous tiles, per tile."""
    return counts.cumsum(0, dtype=torch.int32) - counts
