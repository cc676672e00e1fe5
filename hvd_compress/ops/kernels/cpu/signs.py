"""Signs, with the mean magnitudes of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from hvd_compress.ops.kernels.cpu.codes import WORDS, pack_group, unpack_group
from hvd_compress.ops.kernels.cpu.compiled import (
    BYTES_OUT,
    FLOATS,
    FLOATS_OUT,
    INT,
    NOTHING,
    ROWS,
    WORD,
    filled,
    given,
    loop,
    part,
    total,
)
from hvd_compress.ops.kernels.cpu.levels import copied
from hvd_compress.ops.kernels.cpu.noise import scrambled
from hvd_compress.ops.packing import GROUP


@total
def _magnitudes(x: Any) -> Any:
    """The sum of the magnitudes."""
    magnitudes: Any = 0.0
    for i in range(x.size):
        magnitudes += np.float64(abs(x[i]))
    return magnitudes


@total
def _sums(x: Any) -> Any:
    """The sum of what is not negative, how many these are, and the sum of the others."""
    above: Any = 0.0
    below: Any = 0.0
    ups: Any = np.int32(0)
    for i in range(x.size):
        one = x[i]
        up = one >= 0
        above += np.float64(one if up else np.float32(0))
        below += np.float64(np.float32(0) if up else one)
        ups = np.int32(ups + np.int32(up))
    return above, below, ups


@part
def _scales(x: Any, kind: Any) -> Any:
    """Return the values of nonnegative and of negative coordinates."""
    if kind == 0:
        return np.float32(1), np.float32(-1)
    if kind == 1:
        mean = np.float32(_magnitudes(x) / x.size)
        return mean, -mean
    above, below, ups = _sums(x)
    return np.float32(above / max(ups, 1)), np.float32(below / max(x.size - ups, 1))


@part
def _split(x: Any, zero: Any, above: Any, below: Any, codes: Any, remains: Any) -> None:
    for i in range(remains.size):
        up = x[i] >= 0 if zero else x[i] > 0
        codes[i] = np.uint8(up)
        remains[i] = x[i] - (above if up else below)


@loop(NOTHING, FLOATS, INT, INT, WORD, WORD, filled(types.float32, 2), BYTES_OUT, FLOATS_OUT)
def encode_signs(x: Any, kind: Any, block: Any, seed: Any, key: Any, scales: Any, planes: Any, error: Any) -> None:
    """Write scales and signs of ``x``, and their error to ``error``, if it is not empty.

    Args:
        x: Numbers.
        kind: How many scales a block has: the mean magnitude, or one for each sign.
        block: Coordinates of a block.
        seed: Draws the sign of zeros, where a block has no scales; it is 1 otherwise.
        key: The second one.
        scales: Shape (kind, blocks).
        planes: The packed signs.
        error: May be ``x``.
    """
    n, above, below = x.size, np.float32(1), np.float32(-1)
    zero = kind > 0 or scrambled(np.uint32(0), seed, key) < np.uint32(0x80000000)
    whole, unused, codes = np.empty(GROUP, np.float32), np.empty(GROUP, np.float32), np.empty(GROUP, np.uint8)
    words, packed = codes.view(np.uint64), np.empty(GROUP, np.uint8)
    buffer = packed.view(np.uint64)
    for start in range(0, n, GROUP):
        end = min(start + GROUP, n)
        here = start
        while here < end:
            number = here // block
            stop = min((number + 1) * block, n)
            if here == number * block:
                above, below = _scales(x[here:stop], kind)
                for row in range(kind):
                    scales[row, number] = below if row else above
            stop = min(stop, end)
            copied(x[here:stop], whole)
            remains = error[here:stop] if error.size else unused[: stop - here]
            _split(whole, zero, above, below, codes[here - start :], remains)
            here = stop
        pack_group(codes, words, start, end - start, 1, n, planes, buffer, packed)


@loop(NOTHING, ROWS, given(types.float32, 3), INT, INT, INT, INT, INT, FLOATS_OUT)
def decode_signs(rows: Any, scales: Any, block: Any, n: Any, skip: Any, first: Any, last: Any, out: Any) -> None:
    """Add up what some signs of all rows stand for; see `decode_levels`.

    Args:
        rows: uint8, one payload in each.
        scales: Shape (rows, 2, blocks), from the block of ``first`` on: what stands for what is not negative, and for
            the rest.
        block: Coordinates of a block.
        n: Coordinates of a row.
        skip: Bytes of a payload before its signs.
        first: The first coordinate.
        last: The one after the last.
        out: Where to write these.
    """
    words, buffer = np.empty(WORDS, np.uint64), np.empty(WORDS, np.uint64)
    codes = words.view(np.uint8)
    for start in range(first // GROUP * GROUP, last, GROUP):
        end = min(start + GROUP, n)
        for row in range(rows.shape[0]):
            unpack_group(rows[row, skip:], start, end - start, 1, n, words, buffer)
            here = max(start, first)
            while here < min(end, last):
                number = here // block
                stop = min((number + 1) * block, min(end, last))
                some, place = codes[here - start :], out[here - first : stop - first]
                above, below = scales[row, 0, number - first // block], scales[row, 1, number - first // block]
                if row:
                    for i in range(stop - here):
                        place[i] += above if some[i] else below
                else:
                    for i in range(stop - here):
                        place[i] = above if some[i] else below
                here = stop
