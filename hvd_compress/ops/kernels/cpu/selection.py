"""Select large coordinates."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import types

from hvd_compress.ops.kernels.cpu.bits import MAGNITUDE, bits_of, large_among, lowest_bit
from hvd_compress.ops.kernels.cpu.compiled import (
    FLOATS,
    INDICES,
    INDICES_OUT,
    INT,
    WORD,
    filled,
    given,
    loop,
    part,
    several,
)
from hvd_compress.ops.kernels.cpu.noise import scrambled

Floats: TypeAlias = npt.NDArray[np.float32]
Indices: TypeAlias = npt.NDArray[np.int64]

_LINE, _APART = 16, 64
"""A sample takes as many neighbours at a time as fit a cache line, and one coordinate of as many."""

_SMALL = 2**15
"""Arrays that are not longer are counted without a sample."""


def top_indices(x: Floats, k: int) -> Indices:
    """Ascending indices of the ``k`` largest magnitudes, as `Ops.top_indices` gives."""
    if not k:
        return np.empty(0, np.int64)
    found = _candidates(x, k)
    if found is None:
        found = np.empty(k, np.int64)
        threshold, equal = _kth_of(x, k)
        _collect(x, threshold, equal, found)
        return found
    bits = np.empty(found.size, np.uint32)
    _gather(x, found, bits)
    threshold, equal = _kth(bits, k)
    return found[: _thin(bits, threshold, equal, found)].copy()


def kth_magnitude(x: Floats, k: int) -> np.float32:
    """The k-th largest magnitude; k counts from 1."""
    found = _candidates(x, k)
    if found is None:
        threshold, _ = _kth_of(x, k)
    else:
        bits = np.empty(found.size, np.uint32)
        _gather(x, found, bits)
        threshold, _ = _kth(bits, k)
    return np.float32(np.asarray(threshold, np.uint32).view(np.float32))


def above(x: Floats, threshold: float) -> Indices:
    """Ascending indices of the magnitudes that are not below a threshold."""
    limit = np.float32(threshold)
    if np.isnan(limit):
        return np.empty(0, np.int64)
    found = np.empty(x.size, np.int64)  # what is not written takes no memory
    low = max(limit, np.float32(0)).view(np.uint32) & MAGNITUDE
    found.resize(_collect(x, np.uint32(low), x.size, found), refcheck=False)
    return found


def _candidates(x: Floats, k: int) -> Indices | None:
    """Indices of the largest, of at least ``k`` but not of many more; None if a sample did not tell which these are."""
    if x.size <= _SMALL:
        return None
    sample = np.empty(x.size // (_APART * _LINE) * _LINE, np.uint32)
    _draw(x, sample)
    expected = k * sample.size / x.size
    rank = int(1.05 * expected + 4 * np.sqrt(expected) + 4)
    if rank >= sample.size // 2:
        return None
    low, _ = _kth(sample, rank)
    found = np.empty(int(1.2 * rank / sample.size * x.size) + 64, np.int64)
    count = _collect(x, low, found.size, found)
    return found[:count] if k <= count < found.size else None


@loop(types.void, FLOATS, filled(types.uint32))
def _draw(x: Any, sample: Any) -> None:
    """Take a line at a random place out of each stretch of `_APART` lines."""
    stretch = _APART * _LINE
    for number in range(sample.size // _LINE):
        place = np.int64(scrambled(np.uint32(number), np.uint32(1), np.uint32(2)) % np.uint32(stretch - _LINE))
        place += number * stretch
        for i in range(_LINE):
            sample[number * _LINE + i] = bits_of(x[place + i]) & MAGNITUDE


@loop(types.void, FLOATS, INDICES, filled(types.uint32))
def _gather(x: Any, indices: Any, bits: Any) -> None:
    for i in range(indices.size):
        bits[i] = bits_of(x[indices[i]]) & MAGNITUDE


@part
def _descend(counts: Any, k: Any) -> Any:
    """The bin that has the k-th largest, and how many of its members are among the k largest."""
    place = counts.size - 1
    while counts[place] < k:
        k -= counts[place]
        place -= 1
    return place, k


@part
def _refine(bits: Any, k: Any, prefix: Any, low: Any, width: Any, counts: Any) -> Any:
    """Count the next digit of what begins with a prefix; the prefix of the k-th, and its rank among those."""
    counts[:] = 0
    above, shift, mask = np.uint32(low + width), np.uint32(low), np.uint32((1 << width) - 1)
    for i in range(bits.size):
        word = np.uint32(bits_of(bits[i]) & MAGNITUDE)
        if np.uint32(word >> above) == prefix:
            counts[np.int64(np.uint32(word >> shift) & mask)] += 1
    place, k = _descend(counts[: 1 << width], k)
    return np.uint32(np.uint32(prefix << np.uint32(width)) | np.uint32(place)), k


@loop(several(types.int64, 2), FLOATS, INT)
def _rank(x: Any, k: Any) -> Any:
    """The bits of the k-th largest magnitude, and how many of those that are equal to it are among the k."""
    four = np.zeros((4, 2048), np.int64)
    n = x.size // 4 * 4
    for i in range(0, n, 4):  # tables of their own, as neighbours often fall into the same bin
        four[0, np.int64(np.uint32(bits_of(x[i]) & MAGNITUDE) >> np.uint32(20))] += 1
        four[1, np.int64(np.uint32(bits_of(x[i + 1]) & MAGNITUDE) >> np.uint32(20))] += 1
        four[2, np.int64(np.uint32(bits_of(x[i + 2]) & MAGNITUDE) >> np.uint32(20))] += 1
        four[3, np.int64(np.uint32(bits_of(x[i + 3]) & MAGNITUDE) >> np.uint32(20))] += 1
    for i in range(n, x.size):
        four[0, np.int64(np.uint32(bits_of(x[i]) & MAGNITUDE) >> np.uint32(20))] += 1
    counts = four[0]
    for row in range(1, 4):
        for i in range(2048):
            counts[i] += four[row, i]
    place, k = _descend(counts, k)
    prefix = np.uint32(place)
    prefix, k = _refine(x, k, prefix, 10, 10, four[1])
    prefix, k = _refine(x, k, prefix, 0, 10, four[1])
    return np.int64(prefix), k


def _kth(bits: npt.NDArray[np.uint32], k: int) -> tuple[np.uint32, int]:
    return _kth_of(bits.view(np.float32), k)


def _kth_of(x: Floats, k: int) -> tuple[np.uint32, int]:
    threshold, equal = _rank(x, k)
    return np.uint32(threshold), equal


@loop(types.int64, FLOATS, WORD, INT, INDICES_OUT)
def _collect(x: Any, threshold: Any, equal: Any, found: Any) -> Any:
    """Write the ascending indices of what is above the bits of a threshold, and of the first ones equal to it.

    Args:
        x: Numbers.
        threshold: Bits of a magnitude.
        equal: How many that are equal to it are wanted.
        found: Where to; as many as it has room for.

    Returns:
        How many were written.
    """
    count, room, whole = 0, found.size, x.size // 64 * 64
    for start in range(0, whole, 64):
        large = large_among(x, start, threshold)
        while large != 0:
            i = start + lowest_bit(large)
            large &= large - np.uint64(1)
            if np.uint32(bits_of(x[i]) & MAGNITUDE) == threshold:
                if equal == 0:
                    continue
                equal -= 1
            if count == room:
                return count
            found[count] = i
            count += 1
    for i in range(whole, x.size):
        word = np.uint32(bits_of(x[i]) & MAGNITUDE)
        if word < threshold or (word == threshold and equal == 0):
            continue
        equal -= np.int64(word == threshold)
        if count == room:
            return count
        found[count] = i
        count += 1
    return count


@loop(types.int64, given(types.uint32), WORD, INT, INDICES_OUT)
def _thin(bits: Any, threshold: Any, equal: Any, found: Any) -> Any:
    """Keep what `_collect` would keep of the candidates with these bits."""
    count = 0
    for i in range(bits.size):
        if bits[i] < threshold or (bits[i] == threshold and equal == 0):
            continue
        equal -= np.int64(bits[i] == threshold)
        found[count] = found[i]
        count += 1
    return count
