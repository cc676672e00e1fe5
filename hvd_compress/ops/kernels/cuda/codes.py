"""Layout of codes in bytes (see `hvd_compress.ops.packing`), in Triton."""

from __future__ import annotations

import triton.language as tl

from hvd_compress.ops.kernels.cuda.launching import part
from hvd_compress.ops.packing import GROUP

_GROUP = tl.constexpr(GROUP)


@part
def run_of(groups: tl.tensor, n: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """Return the bytes of each group in a plane of ``8 / LANES`` bits; 0 beyond the end."""
    whole = n // _GROUP
    rest = (n - whole * _GROUP + LANES - 1) // LANES
    return tl.where(groups < whole, _GROUP // LANES, tl.where(groups == whole, rest, 0)).to(tl.int32)


@part
def places(groups: tl.tensor, run: tl.tensor, n: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """The coordinates of some groups, in the order in which a plane packs them.

    Returns:
        int64 and whether they are there, both of shape (groups, LANES, bytes of a whole group).
    """
    lane = tl.arange(0, LANES)[None, :, None]
    byte = tl.arange(0, _GROUP // LANES)[None, None, :]
    index = (groups * _GROUP)[:, None, None] + (lane * run[:, None, None] + byte)
    return index, (byte < run[:, None, None]) & (index < n)


@part
def store_plane(
    plane: tl.tensor, codes: tl.tensor, groups: tl.tensor, run: tl.tensor, LANES: tl.constexpr
) -> tl.tensor:
    """Pack codes of shape (groups, LANES, bytes of a whole group), each below ``2**(8 / LANES)``."""
    lane = tl.arange(0, LANES)[None, :, None]
    byte = tl.arange(0, _GROUP // LANES)[None, :]
    merged = tl.sum(codes << lane * (8 // LANES), axis=1)
    tl.store(plane + (groups * (_GROUP // LANES))[:, None] + byte, merged.to(tl.uint8), mask=byte < run[:, None])


@part
def load_plane(plane: tl.tensor, index: tl.tensor, n: tl.tensor, ok: tl.tensor, PART: tl.constexpr) -> tl.tensor:
    """The codes of coordinates (int64) in a plane of ``PART`` bits: int32."""
    LANES: tl.constexpr = 8 // PART
    whole, rest = n // _GROUP, n % _GROUP
    group, inside = index // _GROUP, (index % _GROUP).to(tl.int32)
    last = tl.maximum((rest + LANES - 1) // LANES, 1).to(tl.int32)
    full: tl.constexpr = _GROUP // LANES
    lane = tl.where(group < whole, inside // full, inside // last)
    byte = group * full + inside - lane * tl.where(group < whole, full, last)
    return (tl.load(plane + byte, mask=ok, other=0).to(tl.int32) >> lane * PART) & ((1 << PART) - 1)


@part
def load_codes(planes: tl.tensor, index: tl.tensor, n: tl.tensor, ok: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """The codes of coordinates: the planes of a width are its binary digits, the widest first and lowest."""
    codes = index.to(tl.int32) * 0
    for place in tl.static_range(4):
        if BITS & 8 >> place:
            codes += load_plane(planes, index, n, ok, 8 >> place) << (BITS & 16 - (16 >> place))
            planes += (n * (8 >> place) + 7) // 8
    return codes
