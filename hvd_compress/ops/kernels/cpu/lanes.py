"""Integers that any allreduce can sum; see `hvd_compress.ops.lanes`."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_compress.ops import second_key
from hvd_compress.ops.coding import TINY
from hvd_compress.ops.kernels.cpu.bits import floor, fused
from hvd_compress.ops.kernels.cpu.compiled import (
    FLOATS,
    FLOATS_OUT,
    INT,
    INTEGERS,
    INTEGERS_OUT,
    NOTHING,
    WORD,
    loop,
    part,
)
from hvd_compress.ops.kernels.cpu.noise import UNIT, coin
from hvd_compress.ops.lanes import lanes_of
from hvd_compress.ops.packing import GROUP

Floats: TypeAlias = npt.NDArray[np.float32]
Integers: TypeAlias = npt.NDArray[np.int32]


def to_lanes(rows: Floats, limits: Floats, top: int, width: int, seed: int) -> Integers:
    """Round rows to integers and pack them for sums, as `Ops.to_lanes` does."""
    inverses = np.broadcast_to(top / np.where(limits > TINY, limits, np.float32(1)), len(rows)).astype(np.float32)
    packed = np.empty(-(-rows.size // lanes_of(width)), np.int32)
    _pack(rows.reshape(-1), inverses, rows.shape[1], top, width, np.uint32(seed), np.uint32(second_key(seed)), packed)
    return packed


def from_lanes(
    packed: Integers, limits: Floats, top: int, width: int, rows: int, columns: int, out: Floats | None = None
) -> Floats:
    """Undo `to_lanes`, also of a sum: shape (rows, columns), written to ``out`` if it is given."""
    steps = np.broadcast_to(limits / np.float32(top), rows).astype(np.float32)
    found = np.empty(rows * columns, np.float32) if out is None else out.reshape(-1)
    _unpack(packed, steps, columns, width, found)
    return found.reshape(rows, columns)


@part
def _add_lane(x: Any, inverse: Any, top: Any, shift: Any, out: Any, start: Any, seed: Any, key: Any) -> None:
    first, limit = np.uint32(start), np.float32(top)
    for i in range(x.size):
        # The product with a power of two is exact, so that this is rounded as if it were not fused.
        scaled = fused(coin(first, i, seed, key), UNIT, x[i] * inverse)
        down = np.int32(floor(min(max(scaled, -limit), limit)))  # the limit is whole: before rounding down, too
        out[i] = np.int32(np.uint32(out[i]) + np.uint32(np.uint32(down) << shift))


@loop(NOTHING, FLOATS, FLOATS, INT, INT, INT, WORD, WORD, INTEGERS_OUT)
def _pack(x: Any, inverses: Any, columns: Any, top: Any, width: Any, seed: Any, key: Any, packed: Any) -> None:
    n, size = x.size, packed.size
    for start in range(0, size, GROUP):
        end = min(start + GROUP, size)
        packed[start:end] = 0
        for lane in range(32 // width):
            here, last, shift = start + lane * size, min(end + lane * size, n), np.uint32(lane * width)
            while here < last:
                row = here // columns
                stop = min((row + 1) * columns, last)
                out = packed[here - lane * size : stop - lane * size]
                _add_lane(x[here:stop], inverses[row], top, shift, out, here, seed, key)
                here = stop


@part
def _read_lane(packed: Any, bias: Any, shift: Any, mask: Any, half: Any, step: Any, out: Any) -> None:
    for i in range(out.size):
        digit = np.uint32(np.uint32(np.uint32(packed[i]) + bias) >> shift)
        out[i] = np.float32(np.int32(np.uint32(np.uint32(digit & mask) - half))) * step


@loop(NOTHING, INTEGERS, FLOATS, INT, INT, FLOATS_OUT)
def _unpack(packed: Any, steps: Any, columns: Any, width: Any, out: Any) -> None:
    n, size, half = out.size, packed.size, 1 << (width - 1)
    bias = np.uint32(0)
    for lane in range(32 // width):
        bias = np.uint32(bias + np.uint32(half << (lane * width)))
    mask = np.uint32((1 << width) - 1)
    for start in range(0, size, GROUP):
        end = min(start + GROUP, size)
        for lane in range(32 // width):
            last, here = min(end + lane * size, n), start + lane * size
            while here < last:
                row = here // columns
                stop = min((row + 1) * columns, last)
                some, shift = packed[here - lane * size : stop - lane * size], np.uint32(lane * width)
                _read_lane(some, bias, shift, mask, np.uint32(half), steps[row], out[here:stop])
                here = stop
