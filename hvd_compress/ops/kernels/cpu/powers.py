"""Codes that are powers of two, and bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from hvd_compress.ops.coding import EXPONENTS
from hvd_compress.ops.kernels.cpu.bits import MAGNITUDE, bits_of, float_of
from hvd_compress.ops.kernels.cpu.casts import narrowed, widened
from hvd_compress.ops.kernels.cpu.compiled import (
    BYTES_OUT,
    FLOATS,
    FLOATS_OUT,
    INT,
    NOTHING,
    ROWS,
    SHORTS_OUT,
    WORD,
    given,
    loop,
    part,
)
from hvd_compress.ops.kernels.cpu.levels import copied
from hvd_compress.ops.kernels.cpu.noise import scrambled
from hvd_compress.ops.packing import GROUP

_FRACTION = np.uint32(2**23 - 1)


@part
def _exponent(x: Any, index: Any, seed: Any, key: Any) -> Any:
    """The exponent of a magnitude, rounded up at random by the hash of its index."""
    bits = np.uint32(bits_of(x) & MAGNITUDE)
    exponent, coin = np.int32(bits >> np.uint32(23)), np.uint32(scrambled(index, seed, key) >> np.uint32(8))
    up = np.int32(coin < np.uint32(np.uint32(bits & _FRACTION) << np.uint32(1)))
    rounded = np.int32(exponent + up) if exponent > 0 else np.int32(0)
    return min(rounded, np.int32(254))


@part
def _power(code: Any, top: Any) -> Any:
    """Decode a power of two; ``top`` is the exponent of the largest magnitude."""
    below = np.int32(code & 127)
    exponent = max(np.int32(0), min(np.int32(below + top - np.int32(EXPONENTS)), np.int32(254)))
    magnitude = float_of(np.uint32(np.uint32(exponent) << np.uint32(23)))
    return np.float32(0) if below == 0 else (-magnitude if code >= 128 else magnitude)


@loop(NOTHING, FLOATS, WORD, WORD, BYTES_OUT, FLOATS_OUT)
def encode_powers(x: Any, seed: Any, key: Any, data: Any, error: Any) -> None:
    """Write the codes of ``x``, and their error to ``error``, if it is not empty; it may be ``x``."""
    n, top = x.size, np.int32(0)
    whole, unused = np.empty(GROUP, np.float32), np.empty(GROUP, np.float32)
    for start in range(0, n, GROUP):
        end, first = min(start + GROUP, n), np.uint32(start)
        copied(x[start:end], whole)
        exponents = data[1 + start : 1 + end]
        for i in range(end - start):
            exponent = _exponent(whole[i], np.uint32(first + np.uint32(i)), seed, key)
            exponents[i] = np.uint8(exponent)
            top = max(top, exponent)
    data[0] = np.uint8(top)
    for start in range(0, n, GROUP):
        end = min(start + GROUP, n)
        copied(x[start:end], whole)
        codes, remains = data[1 + start : 1 + end], error[start:end] if error.size else unused
        for i in range(end - start):
            below = max(np.int32(np.int32(codes[i]) - top + np.int32(EXPONENTS)), np.int32(0))
            code = np.int32(below + (np.int32(128) if whole[i] < 0 else np.int32(0)))
            codes[i] = np.uint8(code)
            remains[i] = whole[i] - _power(code, top)


@loop(NOTHING, ROWS, INT, INT, FLOATS_OUT)
def decode_powers(rows: Any, first: Any, last: Any, out: Any) -> None:
    """Add up what some codes of all rows stand for; see `decode_levels`."""
    for start in range(first, last, GROUP):
        end = min(start + GROUP, last)
        for row in range(rows.shape[0]):
            top, codes = np.int32(rows[row, 0]), rows[row, 1 + start : 1 + end]
            place = out[start - first : end - first]
            if row:
                for i in range(end - start):
                    place[i] += _power(np.int32(codes[i]), top)
            else:
                for i in range(end - start):
                    place[i] = _power(np.int32(codes[i]), top)


@loop(NOTHING, FLOATS, SHORTS_OUT, FLOATS_OUT)
def encode_bfloat16(x: Any, data: Any, error: Any) -> None:
    """Write the nearest bfloat16 to ``x``, and their error to ``error``, if it is not empty."""
    n, whole, unused = x.size, np.empty(GROUP, np.float32), np.empty(GROUP, np.float32)
    for start in range(0, n, GROUP):
        end = min(start + GROUP, n)
        copied(x[start:end], whole)
        codes, remains = data[start:end], error[start:end] if error.size else unused
        for i in range(end - start):
            code = narrowed(whole[i])
            codes[i] = code
            remains[i] = whole[i] - widened(code)


@loop(NOTHING, given(types.uint16, 2), INT, INT, FLOATS_OUT)
def decode_bfloat16(rows: Any, first: Any, last: Any, out: Any) -> None:
    """Add up what some codes of all rows stand for; see `decode_levels`."""
    for start in range(first, last, GROUP):
        end = min(start + GROUP, last)
        for row in range(rows.shape[0]):
            codes, place = rows[row, start:end], out[start - first : end - first]
            if row:
                for i in range(end - start):
                    place[i] += widened(codes[i])
            else:
                for i in range(end - start):
                    place[i] = widened(codes[i])
