"""Reference implementation of codes, in terms of other primitives, that kernels must agree with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.blocks import Blocks
from hvd_compress.ops.code import FLOAT8, LARGEST, Code
from hvd_compress.ops.packing import packed_size
from hvd_compress.ops.top_code import decode_top, encode_top

Encode: TypeAlias = Callable[[Ops, Array, Code, Any], Array]
Decode: TypeAlias = Callable[[Ops, Array, Code, int, str], Array]

TINY = 1e-36
"""Largest scale of a block that is encoded as zero, as the inverse would overflow float32."""

EXPONENTS = 127
"""Number of exponents in a code of powers of two; code 0 is the number zero."""

UNITS = 2**23
"""float32 from this number to its double are whole numbers, and their last bits count from it."""


def encode(ops: Ops, x: Array, code: Code, seed: Any) -> Array:
    """Encode an array of shape ``(n,)`` to ``code.size(n, dtype)`` bytes."""
    return _CODES[code.kind][0](ops, x, code, seed)


def decode(ops: Ops, data: Array, code: Code, n: int, dtype: str) -> Array:
    """Undo `encode` up to rounding: shape ``(n,)`` and this dtype."""
    return _CODES[code.kind][1](ops, data, code, n, dtype)


def _encode_levels(ops: Ops, x: Array, code: Code, seed: Any) -> Array:
    blocks, dtype = Blocks.of(int(x.shape[0]), code.block), ops.dtype(x)
    rows = blocks.cut(ops, x)
    scales = _scales(ops, rows, blocks, code)
    inverse = blocks.column(ops, code.levels / ops.where(scales > TINY, scales, 1.0))
    noise: Array = 0.5
    if code.dither:
        noise = ops.reshape(ops.uniform(seed, blocks.number * blocks.size), (blocks.number, blocks.size))
        noise = ops.cast(noise, dtype)
    y = ops.clip(ops.floor(rows * inverse + noise), -code.levels, code.levels) + code.levels
    return ops.to_bytes(scales, ops.pack(ops.cast(blocks.join(ops, y), "uint8"), code.bits))


def _scales(ops: Ops, rows: Array, blocks: Blocks, code: Code) -> Array:
    peaks = ops.absmax(rows)
    if code.kind == "max" or not (code.kind == "l2" or code.clip):
        return peaks
    inside = rows / blocks.column(ops, ops.where(peaks > 0, peaks, 1.0))  # avoids overflow of the squares
    squares = ops.sum(inside * inside)
    if code.kind == "l2":
        return peaks * ops.sqrt(squares)
    limits = code.clip * peaks * ops.sqrt(squares / blocks.members(ops, ops.dtype(rows)))
    return ops.where(limits < peaks, limits, peaks)


def _decode_levels(ops: Ops, data: Array, code: Code, n: int, dtype: str) -> Array:
    blocks = Blocks.of(n, code.block)
    scales, codes = ops.from_bytes(data, (dtype, blocks.number), ("uint8", packed_size(n, code.bits)))
    y = ops.cast(ops.unpack(codes, code.bits, n), dtype) - code.levels
    return blocks.join(ops, blocks.cut(ops, y) * blocks.column(ops, scales / code.levels))


def _encode_signs(ops: Ops, x: Array, code: Code, seed: Any) -> Array:
    blocks, dtype = Blocks.of(int(x.shape[0]), code.block), ops.dtype(x)
    if code.kind == "one":
        return ops.pack(ops.cast(ops.where(ops.uniform(seed, 1) < 0.5, x >= 0, x > 0), "uint8"), 1)
    bits = ops.pack(ops.cast(x >= 0, "uint8"), 1)
    rows, members = blocks.cut(ops, x), blocks.members(ops, dtype)
    if code.kind == "mean":
        return ops.to_bytes(ops.sum(ops.abs(rows / blocks.column(ops, members))), bits)
    up = ops.cast(rows >= 0, dtype)
    ups = ops.sum(up) - (blocks.size - members)  # without the padding
    downs = members - ups
    ups, downs = ops.where(ups > 0, ups, 1.0), ops.where(downs > 0, downs, 1.0)
    above = ops.sum(rows * up / blocks.column(ops, ups))
    below = ops.sum(rows * (1 - up) / blocks.column(ops, downs))
    return ops.to_bytes(above, below, bits)


def _decode_signs(ops: Ops, data: Array, code: Code, n: int, dtype: str) -> Array:
    blocks = Blocks.of(n, code.block)
    *scales, bits = ops.from_bytes(data, *[(dtype, blocks.number)] * code.scales, ("uint8", packed_size(n, 1)))
    up = ops.unpack(bits, 1, n)
    if not scales:
        return ops.cast(up, dtype) * 2 - 1
    above, below = scales if len(scales) == 2 else (scales[0], -scales[0])
    rows = ops.where(blocks.cut(ops, up) > 0, blocks.column(ops, above), blocks.column(ops, below))
    return blocks.join(ops, rows)


def _encode_powers(ops: Ops, x: Array, code: Code, seed: Any) -> Array:
    n = int(x.shape[0])
    bits = ops.bitcast(ops.cast(ops.abs(x), "float32"), "int32")  # exponent and mantissa, without a sign
    exponents, mantissas = bits // 2**23, ops.cast(bits % 2**23, "float32")
    up = ops.cast(ops.uniform(seed, n) * 2**23 < mantissas, "int32")
    rounded = ops.clip(ops.where(exponents > 0, exponents + up, 0), 0, 254)
    top = ops.reshape(ops.cast(ops.absmax(ops.cast(rounded, "float32")), "int32"), (1,))
    codes = ops.clip(rounded - top + EXPONENTS, 0, EXPONENTS) + ops.cast(x < 0, "int32") * 128
    return ops.to_bytes(ops.cast(top, "uint8"), ops.cast(codes, "uint8"))


def _decode_powers(ops: Ops, data: Array, code: Code, n: int, dtype: str) -> Array:
    top, codes = (ops.cast(part, "int32") for part in ops.from_bytes(data, ("uint8", 1), ("uint8", n)))
    below = codes % 128
    exponents = ops.clip(below + top - EXPONENTS, 0, 254)
    magnitude = ops.bitcast(exponents * 2**23, "float32")
    signed = ops.where(codes >= 128, -magnitude, magnitude)
    return ops.cast(ops.where(below > 0, signed, ops.zeros((), "float32")), dtype)


def _encode_bfloat16(ops: Ops, x: Array, code: Code, seed: Any) -> Array:
    return ops.to_bytes(ops.to_bfloat16(ops.cast(x, "float32")))


def _decode_bfloat16(ops: Ops, data: Array, code: Code, n: int, dtype: str) -> Array:
    (bits,) = ops.from_bytes(data, ("uint16", n))
    return ops.cast(ops.from_bfloat16(bits), dtype)


def _encode_float8(ops: Ops, x: Array, code: Code, seed: Any) -> Array:
    blocks, (mantissa, smallest) = Blocks.of(int(x.shape[0]), code.block), FLOAT8[code.kind]
    rows = blocks.cut(ops, x)
    scales = ops.absmax(rows)
    inverse = blocks.column(ops, LARGEST / ops.where(scales > TINY, scales, 1.0))
    y = ops.cast(blocks.join(ops, rows * inverse), "float32")
    negative = ops.cast(ops.bitcast(y, "int32") < 0, "int32")  # of -0.0, too
    y = ops.clip(ops.abs(y), 0.0, LARGEST)
    exponents = ops.clip(ops.bitcast(y, "int32") // 2**23, smallest, 127)
    y = y * ops.bitcast((254 + mantissa - exponents) * 2**23, "float32")  # in units of the last place
    if code.dither:
        whole = ops.floor(y)
        units = ops.cast(whole, "int32") + ops.cast(ops.uniform(seed, blocks.n) < y - whole, "int32")
    else:
        units = ops.bitcast(y + float(UNITS), "int32") % UNITS  # the sum is rounded to the nearest even
    codes = units + (exponents - smallest) * 2**mantissa + negative * 128
    return ops.to_bytes(scales, ops.cast(codes, "uint8"))


def _decode_float8(ops: Ops, data: Array, code: Code, n: int, dtype: str) -> Array:
    blocks, (mantissa, smallest) = Blocks.of(n, code.block), FLOAT8[code.kind]
    scales, bits = ops.from_bytes(data, (dtype, blocks.number), ("uint8", n))
    codes = ops.cast(bits, "int32")
    exponents = ops.clip(codes % 128 // 2**mantissa, 1, 127) - 1  # those of subnormal and the smallest normal: 0
    units = ops.cast(codes % 128 - exponents * 2**mantissa, "float32")
    magnitudes = units * ops.bitcast((exponents + smallest - mantissa) * 2**23, "float32")
    y = ops.cast(ops.where(codes >= 128, -magnitudes, magnitudes), dtype)
    return blocks.join(ops, blocks.cut(ops, y) * blocks.column(ops, scales / LARGEST))


_LEVELS, _SIGNS = (_encode_levels, _decode_levels), (_encode_signs, _decode_signs)
_CODES: dict[str, tuple[Encode, Decode]] = {
    "max": _LEVELS,
    "l2": _LEVELS,
    "clipped": _LEVELS,
    "mean": _SIGNS,
    "means": _SIGNS,
    "one": _SIGNS,
    "powers": (_encode_powers, _decode_powers),
    "bfloat16": (_encode_bfloat16, _decode_bfloat16),
    "e4m3": (_encode_float8, _decode_float8),
    "e5m2": (_encode_float8, _decode_float8),
    "top": (lambda ops, x, code, seed: encode_top(ops, x, code), decode_top),
}
