"""Packed codes, with nothing else done to them; see `hvd_compress.ops.packing`."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import ExchangeError
from hvd_compress.ops import wrong_length
from hvd_compress.ops.kernels.cpu.codes import WORDS, pack_group, unpack_group
from hvd_compress.ops.kernels.cpu.compiled import BYTES, BYTES_OUT, INT, NOTHING, ROWS, loop, part
from hvd_compress.ops.packing import GROUP, packed_size

Bytes: TypeAlias = npt.NDArray[np.uint8]


def pack(codes: Bytes, bits: int) -> Bytes:
    """Pack codes, each below ``2**bits``."""
    data = np.empty(packed_size(codes.size, bits), np.uint8)
    _pack(codes, bits, data)
    return data


def unpack(data: Bytes, bits: int, n: int) -> Bytes:
    """Undo `pack`: the ``n`` codes.

    Raises:
        ExchangeError: If there are more or fewer bytes than they take.
    """
    if data.size != packed_size(n, bits):
        raise ExchangeError(wrong_length(data.size, packed_size(n, bits)))
    codes = np.empty(n, np.uint8)
    _unpack(data, bits, codes)
    return codes


def saturating_sum(rows: Bytes, bits: int, zero: int, size: int) -> Bytes:
    """Add up the codes of all rows and clip the sums, as `Ops.saturating_sum` does.

    Raises:
        ExchangeError: If a row has more or fewer bytes than ``size``.
    """
    if rows.shape[1] != size:
        raise ExchangeError(wrong_length(rows.shape[1], size))
    total = np.zeros(size, np.uint8)
    _saturating_sum(rows, bits, zero, total)
    return total


@part
def _copy(source: Any, to: Any) -> None:
    for j in range(source.size):  # compiled to whole vectors, which an assignment of arrays is not
        to[j] = source[j]


@loop(NOTHING, BYTES, INT, BYTES_OUT)
def _pack(codes: Any, bits: Any, data: Any) -> None:
    n, some, packed = codes.size, np.empty(GROUP, np.uint8), np.empty(GROUP, np.uint8)
    words, buffer = some.view(np.uint64), packed.view(np.uint64)
    for start in range(0, n, GROUP):
        members = min(GROUP, n - start)
        _copy(codes[start : start + members], some)
        pack_group(some, words, start, members, bits, n, data, buffer, packed)


@loop(NOTHING, BYTES, INT, BYTES_OUT)
def _unpack(data: Any, bits: Any, codes: Any) -> None:
    n, words, buffer = codes.size, np.empty(WORDS, np.uint64), np.empty(WORDS, np.uint64)
    some = words.view(np.uint8)
    for start in range(0, n, GROUP):
        members = min(GROUP, n - start)
        unpack_group(data, start, members, bits, n, words, buffer)
        _copy(some[:members], codes[start:])


@loop(NOTHING, ROWS, INT, INT, BYTES_OUT)
def _saturating_sum(rows: Any, bits: Any, zero: Any, total: Any) -> None:
    """Lane by lane: which code lies where does not matter, as it is the same in all rows."""
    sums, top = np.empty(GROUP, np.int32), np.int32((1 << bits) - 1)
    for start in range(0, total.size, GROUP):
        out = total[start : start + GROUP]
        for shift in range(0, 8, bits):
            sums[:] = np.int32(zero - rows.shape[0] * zero)
            for row in range(rows.shape[0]):
                some = rows[row, start : start + GROUP]
                for j in range(some.size):
                    sums[j] += np.int32(some[j]) >> np.int32(shift) & top
            for j in range(out.size):
                out[j] |= np.uint8(min(max(sums[j], np.int32(0)), top) << np.int32(shift))
