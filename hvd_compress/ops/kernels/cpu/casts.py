"""float32 as numbers of 16 bits, and back, in the bits that numpy gives."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_compress.ops.kernels.cpu.bits import MAGNITUDE, bits_of, float_of
from hvd_compress.ops.kernels.cpu.compiled import FLOATS, FLOATS_OUT, NOTHING, SHORTS, SHORTS_OUT, loop, part

Floats: TypeAlias = npt.NDArray[np.float32]
Shorts: TypeAlias = npt.NDArray[np.uint16]

_INF, _INF16 = np.uint32(0x7F800000), np.uint32(0x7C00)
_BEYOND = np.uint32(143 << 23)
"""2^16, beyond all float16."""
_SMALLEST = np.uint32(113 << 23)
"""2^-14, the smallest float16 with all of its bits."""
_HALF = np.uint32(126 << 23)
"""1/2: in float32 it has the last bit of the smallest float16, so that a sum with it is rounded there."""


def to_float16(x: Floats) -> npt.NDArray[np.float16]:
    """The nearest float16; inf beyond their range."""
    bits = np.empty(x.shape, np.uint16)
    _to_float16(x, bits)
    return bits.view(np.float16)


def from_float16(x: npt.NDArray[np.float16]) -> Floats:
    """Undo `to_float16`."""
    found = np.empty(x.shape, np.float32)
    _from_float16(x.view(np.uint16), found)
    return found


def to_bfloat16(x: Floats) -> Shorts:
    """The nearest bfloat16, as its bits."""
    bits = np.empty(x.shape, np.uint16)
    _to_bfloat16(x, bits)
    return bits


def from_bfloat16(x: Shorts) -> Floats:
    """Undo `to_bfloat16`."""
    found = np.empty(x.shape, np.float32)
    _from_bfloat16(x, found)
    return found


@part
def narrowed(x: Any) -> Any:
    """The nearest bfloat16, as its bits."""
    bits = bits_of(x)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd) >> np.uint32(16))


@part
def widened(x: Any) -> Any:
    """Undo `narrowed`."""
    return float_of(np.uint32(np.uint32(x) << np.uint32(16)))


@part
def _halved(x: Any) -> Any:
    """The nearest float16, as its bits."""
    bits = bits_of(x)
    size = np.uint32(bits & MAGNITUDE)
    odd = np.uint32(np.uint32(size >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(np.uint32(size - np.uint32((112 << 23) - 0xFFF) + odd) >> np.uint32(13))
    small = np.uint32(bits_of(float_of(size) + float_of(_HALF)) - _HALF)
    fraction = np.uint32(np.uint32(size >> np.uint32(13)) & np.uint32(0x3FF))
    nan = np.uint32(_INF16 + (fraction if fraction != 0 else np.uint32(1)))
    large = nan if size > _INF else _INF16
    kept = small if size < _SMALLEST else (large if size >= _BEYOND else normal)
    return np.uint16(kept | np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000)))


@part
def _doubled(x: Any) -> Any:
    """Undo `_halved`."""
    size = np.uint32(np.uint32(np.uint32(x) & np.uint32(0x7FFF)) << np.uint32(13))
    exponent = np.uint32(size & np.uint32(0x1F << 23))
    normal = np.uint32(size + np.uint32(112 << 23))
    small = bits_of(float_of(np.uint32(size + _SMALLEST)) - float_of(_SMALLEST))
    large = np.uint32(normal + np.uint32(112 << 23))
    kept = small if exponent == 0 else (large if exponent == np.uint32(0x1F << 23) else normal)
    return float_of(np.uint32(kept | np.uint32(np.uint32(np.uint32(x) & np.uint32(0x8000)) << np.uint32(16))))


@loop(NOTHING, FLOATS, SHORTS_OUT)
def _to_bfloat16(x: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = narrowed(x[i])


@loop(NOTHING, SHORTS, FLOATS_OUT)
def _from_bfloat16(x: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = widened(x[i])


@loop(NOTHING, FLOATS, SHORTS_OUT)
def _to_float16(x: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = _halved(x[i])


@loop(NOTHING, SHORTS, FLOATS_OUT)
def _from_float16(x: Any, out: Any) -> None:
    for i in range(x.size):
        out[i] = _doubled(x[i])
