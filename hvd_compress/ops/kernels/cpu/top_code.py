"""The largest coordinates of blocks, as `hvd_compress.ops.code.Record` lays them out."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from hvd_compress.ops.kernels.cpu.bits import MAGNITUDE, bits_of, large_among, lowest_bit
from hvd_compress.ops.kernels.cpu.casts import narrowed, widened
from hvd_compress.ops.kernels.cpu.compiled import FLOATS, FLOATS_OUT, INT, NOTHING, ROWS, filled, given, loop, part
from hvd_compress.ops.top_code import LARGEST_BFLOAT16

_CHUNK = 64
_MOST = np.float32(LARGEST_BFLOAT16)


@part
def _reaching(bits: Any, least: Any) -> Any:
    """How many magnitudes reach a threshold."""
    count = np.int32(0)
    for i in range(bits.size):
        count = np.int32(count + np.int32(bits[i] >= least))
    return count


@part
def _kth(bits: Any, k: Any) -> Any:
    """Bits that exactly the ``k`` largest magnitudes reach, or those of the k-th."""
    found = np.uint32(0)
    for place in range(31):
        candidate = np.uint32(found | np.uint32(1) << np.uint32(30 - place))
        count = _reaching(bits, candidate)
        if count >= k:
            found = candidate
        if count == k:
            break
    return found


@part
def _select(block: Any, bits: Any, size: Any, indices: Any) -> None:
    """Write the ascending indices of the largest magnitudes; ties go to the lower index."""
    kept = indices.size
    least = _kth(bits[:size], kept)
    equal = kept - (_reaching(bits[:size], np.uint32(least + np.uint32(1))))
    count = 0
    for start in range(0, bits.size, _CHUNK):
        large = large_among(block, start, least)
        while large != 0 and count < kept:
            i = start + lowest_bit(large)
            large &= large - np.uint64(1)
            if bits[i] == least:
                if equal == 0:
                    continue
                equal -= 1
            indices[count] = i
            count += 1


@part
def _magnitudes(block: Any, indices: Any) -> Any:
    """The mean of the selected magnitudes, and the means of those above it and of the others, as bfloat16."""
    mean: Any = 0.0
    above: Any = 0.0
    below: Any = 0.0
    ups = 0
    for i in indices:
        mean += np.float64(abs(block[i]))
    mean /= indices.size
    for i in indices:
        size = np.float64(abs(block[i]))
        if size > mean:
            above += size
            ups += 1
        else:
            below += size
    first, second = np.float32(above / max(ups, 1)), np.float32(below / max(indices.size - ups, 1))
    return mean, narrowed(min(first, _MOST)), narrowed(min(second, _MOST))


@part
def _put(record: Any, place: Any, value: Any) -> None:
    """Set bits from a place on, which are zero so far."""
    byte, value = place >> 3, np.uint64(value) << np.uint64(place & 7)
    while value != 0:
        record[byte] |= np.uint8(value & np.uint64(255))
        value >>= np.uint64(8)
        byte += 1


@part
def _get(record: Any, place: Any, bits: Any) -> Any:
    """Read up to 32 bits from a place on: int64."""
    value, byte, shift = np.uint64(0), place >> 3, np.uint64(0)
    while np.int64(shift) < bits + (place & 7):
        value |= np.uint64(record[byte]) << shift
        shift += np.uint64(8)
        byte += 1
    return np.int64(value >> np.uint64(place & 7) & ((np.uint64(1) << np.uint64(bits)) - np.uint64(1)))


@loop(NOTHING, FLOATS, INT, INT, INT, INT, filled(types.uint16, 2), filled(types.uint8, 2), FLOATS_OUT)
def encode_top(x: Any, size: Any, kept: Any, low: Any, highs: Any, scales: Any, records: Any, error: Any) -> None:
    """Write scales and records of ``x``, and their error to ``error``, if it is not empty.

    Args:
        x: Numbers.
        size: Coordinates of a block.
        kept: Coordinates that are kept of it.
        low: Low bits of an index.
        highs: Bits for the high parts.
        scales: Bits of bfloat16, shape (2, blocks).
        records: uint8, shape (blocks, bytes).
        error: May be ``x``.
    """
    room = (size + _CHUNK - 1) // _CHUNK * _CHUNK
    block, bits, indices = np.empty(room, np.float32), np.empty(room, np.uint32), np.empty(kept, np.int64)
    records[:] = 0
    for row in range(records.shape[0]):
        start = row * size
        members = min(size, x.size - start)
        for i in range(members):
            block[i] = x[start + i]
        block[members:] = 0
        for i in range(room):
            bits[i] = bits_of(block[i]) & MAGNITUDE
        _select(block, bits, size, indices)
        mean, above, below = _magnitudes(block, indices)
        scales[0, row], scales[1, row] = above, below
        if error.size:
            error[start : start + members] = block[:members]
        record = records[row]
        for order in range(kept):
            i = indices[order]
            value = block[i]
            negative, large = value < 0, np.float64(abs(value)) > mean
            _put(record, (i >> low) + order, 1)
            code = np.int64(negative) | np.int64(large) << 1 | (i & ((1 << low) - 1)) << 2
            _put(record, highs + order * (low + 2), code)
            if error.size and i < members:
                stands = widened(above) if large else widened(below)
                error[start + i] = value - (-stands if negative else stands)


@loop(NOTHING, ROWS, given(types.float32, 3), INT, INT, INT, INT, INT, INT, INT, INT, FLOATS_OUT)
def decode_top(
    rows: Any,
    scales: Any,
    size: Any,
    kept: Any,
    low: Any,
    highs: Any,
    skip: Any,
    width: Any,
    first: Any,
    last: Any,
    out: Any,
) -> None:
    """Add up what the coordinates from ``first`` up to ``last`` of all rows stand for.

    Args:
        rows: uint8, one payload in each.
        scales: Shape (rows, 2, blocks).
        size: Coordinates of a block.
        kept: Coordinates that are kept of it.
        low: Low bits of an index.
        highs: Bits for the high parts.
        skip: Bytes of a payload before its records.
        width: Bytes of a record.
        first: The first coordinate.
        last: The one after the last.
        out: Where to write these.
    """
    out[:] = 0
    for block in range(first // size, (last + size - 1) // size if last > first else 0):
        for row in range(rows.shape[0]):
            record = rows[row, skip + block * width : skip + (block + 1) * width]
            above, below, order = scales[row, 0, block], scales[row, 1, block], 0
            for byte in range((highs + 7) // 8):
                word = np.uint64(record[byte])
                while word != 0 and order < kept:
                    place = byte * 8 + lowest_bit(word)
                    word &= word - np.uint64(1)
                    if place >= highs:
                        break
                    code = _get(record, highs + order * (low + 2), low + 2)
                    i = place - order << low | code >> 2
                    order += 1
                    at = block * size + i
                    if i < size and first <= at < last:
                        value = above if code & 2 else below
                        out[at - first] += -value if code & 1 else value
