"""Codes that are multiples of a scale."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from hvd_compress.ops.coding import TINY
from hvd_compress.ops.kernels.cpu.bits import MAGNITUDE, bits_of, float_of, floor, fused
from hvd_compress.ops.kernels.cpu.codes import WORDS, pack_group, unpack_group
from hvd_compress.ops.kernels.cpu.compiled import (
    BYTES_OUT,
    FLAG,
    FLOAT,
    FLOATS,
    FLOATS_OUT,
    INT,
    NOTHING,
    ROWS,
    WORD,
    given,
    loop,
    part,
)
from hvd_compress.ops.kernels.cpu.noise import UNIT, coin
from hvd_compress.ops.kernels.cpu.reductions import peak_of, squares_of
from hvd_compress.ops.packing import GROUP

PEAK, L2, CLIPPED = range(3)
"""Kinds of scales."""

_TINY = np.float32(TINY)


@part
def _level(x: Any, scaled: Any, levels: Any, step: Any) -> Any:
    """The number of a level, and what it leaves; the limits are whole, so they may come before rounding down."""
    down = floor(min(max(scaled, -levels), levels))
    return np.uint8(np.int32(down + levels)), x - down * step


@part
def _near(x: Any, inverse: Any, levels: Any, step: Any, codes: Any, remains: Any) -> None:
    half = np.float32(0.5)
    for i in range(remains.size):
        codes[i], remains[i] = _level(x[i], x[i] * inverse + half, levels, step)


@part
def _dithered(
    x: Any, inverse: Any, levels: Any, step: Any, codes: Any, remains: Any, start: Any, seed: Any, key: Any
) -> None:
    first = np.uint32(start)
    for i in range(remains.size):
        # The product with a power of two is exact, so that this is rounded as if it were not fused.
        scaled = fused(coin(first, i, seed, key), UNIT, x[i] * inverse)
        codes[i], remains[i] = _level(x[i], scaled, levels, step)


@part
def copied(x: Any, out: Any) -> Any:
    """Copy ``x``; return its largest magnitude."""
    peak = np.uint32(0)
    for i in range(x.size):
        out[i] = x[i]
        peak = max(peak, np.uint32(bits_of(x[i]) & MAGNITUDE))
    return float_of(peak)


@part
def _scale(x: Any, start: Any, stop: Any, kind: Any, clip: Any) -> Any:
    peak = peak_of(x, start, stop)
    if kind == PEAK or (kind == CLIPPED and clip == 0):
        return peak
    length = squares_of(x, start, stop)
    if kind == L2:
        return np.float32(np.sqrt(length))
    return min(peak, np.float32(clip * np.sqrt(length / (stop - start))))


@loop(
    NOTHING, FLOATS, INT, INT, INT, FLOAT, FLAG, WORD, WORD, FLOATS_OUT, BYTES_OUT, FLOATS_OUT
)  # fmt: skip
def encode_levels(
    x: Any, kind: Any, bits: Any, block: Any, clip: Any, dither: Any, seed: Any, key: Any,
    scales: Any, planes: Any, error: Any,
) -> None:  # fmt: skip
    """Write scales and codes of ``x``, and their error to ``error``, if it is not empty."""
    n, levels, scale = x.size, np.float32((1 << (bits - 1)) - 1), np.float32(0)
    whole, unused, codes = np.empty(GROUP, np.float32), np.empty(GROUP, np.float32), np.empty(GROUP, np.uint8)
    words, packed = codes.view(np.uint64), np.empty(GROUP, np.uint8)
    buffer = packed.view(np.uint64)
    for start in range(0, n, GROUP):
        end = min(start + GROUP, n)
        here = start
        while here < end:
            number = here // block
            last = min((number + 1) * block, n)
            stop = min(last, end)
            peak = copied(x[here:stop], whole)
            if here == number * block:
                alone = kind == PEAK and stop == last
                scale = peak if alone else _scale(x, here, last, kind, clip)
                scales[number] = scale
            inverse, step = levels / (scale if scale > _TINY else np.float32(1)), scale / levels
            lows, remains = codes[here - start :], error[here:stop] if error.size else unused[: stop - here]
            if dither:
                _dithered(whole, inverse, levels, step, lows, remains, here, seed, key)
            else:
                _near(whole, inverse, levels, step, lows, remains)
            here = stop
        pack_group(codes, words, start, end - start, bits, n, planes, buffer, packed)


@loop(NOTHING, ROWS, given(types.float32, 2), INT, INT, INT, INT, INT, INT, FLOATS_OUT)
def decode_levels(
    rows: Any, steps: Any, bits: Any, block: Any, n: Any, skip: Any, first: Any, last: Any, out: Any
) -> None:
    """Add up what some codes of all rows stand for.

    Args:
        rows: uint8, one payload in each; its planes begin after ``skip`` bytes.
        steps: What one level stands for, for each block of each row, from that of ``first`` on.
        bits: Of a code.
        block: Coordinates of a block.
        n: Coordinates of a row.
        skip: See ``rows``.
        first: The first coordinate.
        last: The one after the last.
        out: Where to write these.
    """
    words, buffer, levels = np.empty(WORDS, np.uint64), np.empty(WORDS, np.uint64), np.int32((1 << (bits - 1)) - 1)
    codes = words.view(np.uint8)
    for start in range(first // GROUP * GROUP, last, GROUP):
        end = min(start + GROUP, n)
        for row in range(rows.shape[0]):
            unpack_group(rows[row, skip:], start, end - start, bits, n, words, buffer)
            here = max(start, first)
            while here < min(end, last):
                number = here // block
                stop = min((number + 1) * block, min(end, last))
                some, place = codes[here - start :], out[here - first : stop - first]
                step = steps[row, number - first // block]
                if row:
                    for i in range(stop - here):
                        place[i] += np.float32(np.int32(some[i]) - levels) * step
                else:
                    for i in range(stop - here):
                        place[i] = np.float32(np.int32(some[i]) - levels) * step
                here = stop
