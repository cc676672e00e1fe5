"""Codes that are 8-bit floats, with a scale per block."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from hvd_compress.ops.code import LARGEST
from hvd_compress.ops.coding import TINY, UNITS
from hvd_compress.ops.kernels.cpu.bits import MAGNITUDE, bits_of, float_of
from hvd_compress.ops.kernels.cpu.compiled import (
    BYTES_OUT,
    FLAG,
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
from hvd_compress.ops.kernels.cpu.levels import copied
from hvd_compress.ops.kernels.cpu.noise import UNIT, coin
from hvd_compress.ops.kernels.cpu.reductions import peak_of
from hvd_compress.ops.packing import GROUP

_TINY, _LARGEST, _UNITS = np.float32(TINY), np.float32(LARGEST), np.float32(UNITS)
_LARGEST_BITS, _UNITS_BITS = _LARGEST.view(np.uint32), _UNITS.view(np.uint32)
_SIGN, _SHORT_SIGN = np.uint32(1 << 31), np.uint32(128)


@part
def _exponent(bits: Any, smallest: Any) -> Any:
    """Return the exponent of a magnitude, that of the smallest normal number for what is below."""
    return max(np.uint32(bits >> np.uint32(23)), smallest)


@part
def _in_units(bits: Any, exponent: Any, mantissa: Any) -> Any:
    """Return a magnitude in units of the last place."""
    inverse = np.uint32(np.uint32(np.uint32(254) + mantissa) - exponent)
    return float_of(bits) * float_of(np.uint32(inverse << np.uint32(23)))


@part
def _code(units: Any, exponent: Any, sign: Any, mantissa: Any, smallest: Any) -> Any:
    above = np.uint32(np.uint32(exponent - smallest) << mantissa)
    return np.uint32(np.uint32(units + above) | np.uint32(sign >> np.uint32(24)))


@part
def _float(units: Any, exponent: Any, sign: Any, mantissa: Any) -> Any:
    """Return the number with so many units of the last place."""
    unit = float_of(np.uint32(np.uint32(exponent - mantissa) << np.uint32(23)))
    return float_of(np.uint32(bits_of(np.float32(np.int32(units)) * unit) | sign))


@part
def _near(x: Any, inverse: Any, step: Any, mantissa: Any, smallest: Any, codes: Any, remains: Any) -> None:
    for i in range(remains.size):
        bits = bits_of(x[i] * inverse)
        size, sign = min(np.uint32(bits & MAGNITUDE), _LARGEST_BITS), np.uint32(bits & _SIGN)
        exponent = _exponent(size, smallest)
        units = np.uint32(bits_of(_in_units(size, exponent, mantissa) + _UNITS) - _UNITS_BITS)
        codes[i] = np.uint8(_code(units, exponent, sign, mantissa, smallest))
        remains[i] = x[i] - _float(units, exponent, sign, mantissa) * step


@part
def _dithered(
    x: Any, inverse: Any, step: Any, mantissa: Any, smallest: Any, codes: Any, remains: Any,
    start: Any, seed: Any, key: Any,
) -> None:  # fmt: skip
    first = np.uint32(start)
    for i in range(remains.size):
        bits = bits_of(x[i] * inverse)
        size, sign = min(np.uint32(bits & MAGNITUDE), _LARGEST_BITS), np.uint32(bits & _SIGN)
        exponent = _exponent(size, smallest)
        scaled = _in_units(size, exponent, mantissa)
        whole = np.int32(scaled)
        up = coin(first, i, seed, key) * UNIT < scaled - np.float32(whole)
        units = np.uint32(np.uint32(whole) + np.uint32(up))
        codes[i] = np.uint8(_code(units, exponent, sign, mantissa, smallest))
        remains[i] = x[i] - _float(units, exponent, sign, mantissa) * step


@loop(NOTHING, FLOATS, WORD, WORD, INT, FLAG, WORD, WORD, FLOATS_OUT, BYTES_OUT, FLOATS_OUT)
def encode_float8(
    x: Any, mantissa: Any, smallest: Any, block: Any, dither: Any, seed: Any, key: Any,
    scales: Any, codes: Any, error: Any,
) -> None:  # fmt: skip
    """Write scales and codes of ``x``, and their error to ``error``, if it is not empty; it may be ``x``."""
    whole, unused = np.empty(GROUP, np.float32), np.empty(GROUP, np.float32)
    for number in range(scales.size):
        last = min((number + 1) * block, x.size)
        scale = peak_of(x, number * block, last)
        scales[number] = scale
        inverse, step = _LARGEST / (scale if scale > _TINY else np.float32(1)), scale / _LARGEST
        for start in range(number * block, last, GROUP):
            stop = min(start + GROUP, last)
            copied(x[start:stop], whole)
            some, remains = codes[start:stop], error[start:stop] if error.size else unused[: stop - start]
            if dither:
                _dithered(whole, inverse, step, mantissa, smallest, some, remains, start, seed, key)
            else:
                _near(whole, inverse, step, mantissa, smallest, some, remains)


@part
def _value(code: Any, mantissa: Any, smallest: Any) -> Any:
    """Return what a code stands for."""
    bits = np.uint32(code)
    below, sign = np.uint32(bits & np.uint32(127)), np.uint32(np.uint32(bits & _SHORT_SIGN) << np.uint32(24))
    above = np.uint32(max(np.uint32(below >> mantissa), np.uint32(1)) - np.uint32(1))
    units = np.uint32(below - np.uint32(above << mantissa))
    return _float(units, np.uint32(above + smallest), sign, mantissa)


@loop(NOTHING, ROWS, given(types.float32, 2), WORD, WORD, INT, INT, INT, INT, FLOATS_OUT)
def decode_float8(
    rows: Any, steps: Any, mantissa: Any, smallest: Any, block: Any, skip: Any, first: Any, last: Any, out: Any
) -> None:
    """Add up what some codes of all rows stand for; see `decode_levels`."""
    here = first
    while here < last:
        number = here // block
        stop = min(min((number + 1) * block, here + GROUP), last)
        place = out[here - first : stop - first]
        for row in range(rows.shape[0]):
            codes, step = rows[row, skip + here : skip + stop], steps[row, number - first // block]
            if row:
                for i in range(place.size):
                    place[i] += _value(codes[i], mantissa, smallest) * step
            else:
                for i in range(place.size):
                    place[i] = _value(codes[i], mantissa, smallest) * step
        here = stop
