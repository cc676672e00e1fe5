"""`Ops.quantise` and `Ops.dequantise` of numpy arrays."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import ExchangeError
from hvd_compress.ops import second_key, wrong_length
from hvd_compress.ops.code import Code, Float8
from hvd_compress.ops.kernels.cpu.casts import from_bfloat16
from hvd_compress.ops.kernels.cpu.float8 import decode_float8, encode_float8
from hvd_compress.ops.kernels.cpu.levels import CLIPPED, L2, PEAK, decode_levels, encode_levels
from hvd_compress.ops.kernels.cpu.powers import decode_bfloat16, decode_powers, encode_bfloat16, encode_powers
from hvd_compress.ops.kernels.cpu.signs import decode_signs, encode_signs
from hvd_compress.ops.kernels.cpu.top_code import decode_top, encode_top
from hvd_compress.ops.top_code import layout_of

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]

_EMPTY = np.empty(0, np.float32)
_SCALES = {"max": PEAK, "l2": L2, "clipped": CLIPPED}
_SIGNS = {"one": 0, "mean": 1, "means": 2}


def quantise(x: Floats, code: Code, seed: int, out: Floats | None = None) -> Bytes:
    """Compress an array as `Ops.quantise` does.

    Args:
        x: Shape ``(n,)``; neither inf nor nan.
        code: How.
        seed: Of the dither, or of the sign of zeros.
        out: Where to write ``x`` minus what is sent; may be ``x``. None does not.

    Returns:
        The bytes.
    """
    n = x.size
    data = np.empty(code.size(n, "float32"), np.uint8)
    error = _EMPTY if out is None else out
    if code.kind == "bfloat16":
        encode_bfloat16(x, data.view(np.uint16), error)
    elif code.kind == "powers":
        encode_powers(x, *_keys(seed), data, error)
    elif code.kind == "top":
        blocks, record = layout_of(code, n)
        head, records = data[: 4 * blocks.number].view(np.uint16), data[4 * blocks.number :]
        encode_top(x, blocks.size, *record, head.reshape(2, -1), records.reshape(-1, record.size), error)
    else:
        block, skip = _layout(code, n)
        scales, planes = data[:skip].view(np.float32), data[skip:]
        if code.kind in _SIGNS:
            kind = _SIGNS[code.kind]
            encode_signs(x, kind, block, *_keys(seed), scales.reshape(kind, scales.size // max(kind, 1)), planes, error)
        elif code.float8:
            encode_float8(x, *_float8(code.float8), block, code.dither, *_keys(seed), scales, planes, error)
        else:
            how = (_SCALES[code.kind], code.bits, block, code.clip, code.dither)
            encode_levels(x, *how, *_keys(seed), scales, planes, error)
    return data


def dequantise(
    rows: Bytes,
    code: Code,
    n: int,
    join: bool = False,
    out: Floats | None = None,
    span: tuple[int, int] | None = None,
) -> Floats:
    """Undo `quantise` for several arrays and add them up, or put them one after another.

    Args:
        rows: One payload in each.
        code: How they were compressed.
        n: Coordinates of each.
        join: Put them one after another instead.
        out: Where to; None makes a new array.
        span: The part of the result to give: its first place, and that after its last; None gives all of it.

    Raises:
        ExchangeError: If the rows are longer or shorter than they should be.
    """
    count, size = rows.shape
    if size != code.size(n, "float32"):
        raise ExchangeError(wrong_length(size, code.size(n, "float32")))
    first, last = (0, n * (count if join else 1)) if span is None else span
    rows = np.ascontiguousarray(rows)
    total = np.empty(last - first, np.float32) if out is None else out
    if not join:
        _decode(rows, code, n, first, last, total)
    for row in range(first // n, -(-last // n)) if join and n else ():
        begin = row * n
        start, stop = max(first, begin), min(last, begin + n)
        _decode(rows[row : row + 1], code, n, start - begin, stop - begin, total[start - first : stop - first])
    return total


def _decode(rows: Bytes, code: Code, n: int, first: int, last: int, out: Floats) -> None:
    """Add up what the coordinates from ``first`` up to ``last`` of all rows stand for."""
    if code.kind == "bfloat16":
        decode_bfloat16(_aligned(rows, np.uint16), first, last, out)
    elif code.kind == "powers":
        decode_powers(rows, first, last, out)
    elif code.kind == "top":
        cut, record = layout_of(code, n)
        skip = 4 * cut.number
        scales = from_bfloat16(np.ascontiguousarray(rows[:, :skip]).view(np.uint16).reshape(-1))
        both = scales.reshape(len(rows), 2, cut.number)
        decode_top(rows, both, cut.size, *record, skip, record.size, first, last, out)
    else:
        block, skip = _layout(code, n)
        blocks = slice(first // block, -(-last // block))
        scales = np.ascontiguousarray(rows[:, :skip]).view(np.float32)
        if code.kind in _SIGNS:
            both = _both(scales, _SIGNS[code.kind])[:, :, blocks]
            decode_signs(rows, np.ascontiguousarray(both), block, n, skip, first, last, out)
        else:
            steps = scales[:, blocks] / np.float32(code.top)
            if code.float8:
                decode_float8(rows, steps, *_float8(code.float8), block, skip, first, last, out)
            else:
                decode_levels(rows, steps, code.bits, block, n, skip, first, last, out)


def _layout(code: Code, n: int) -> tuple[int, int]:
    """Coordinates of a block, and how many bytes the scales take."""
    block = max(1, min(n, code.block if code.scales else n))
    return block, 4 * code.scales * -(-n // block)


def _float8(form: Float8) -> tuple[Any, Any]:
    return np.uint32(form.mantissa), np.uint32(form.exponent)


def _keys(seed: int) -> tuple[Any, Any]:
    return np.uint32(seed), np.uint32(second_key(seed))


def _both(scales: Floats, kind: int) -> Floats:
    """Return the value of each sign, shape (rows, 2, blocks)."""
    count = len(scales)
    if kind == 2:
        return scales.reshape(count, 2, -1)
    above = scales if kind else np.ones((count, 1), np.float32)
    return np.stack([above, -above], axis=1)


def _aligned(rows: Bytes, dtype: type[np.uint16]) -> npt.NDArray[np.uint16]:
    """The rows as numbers, copied if they do not lie as these have to."""
    words = rows.view(dtype)
    return words if words.flags.aligned else words.copy()
