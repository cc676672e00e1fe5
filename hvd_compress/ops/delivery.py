"""Decode sums part by part into the same memory, and copy each part to the gradients.

This needs no vector of the size of the sum, and decoded parts are still in the cache when they are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_compress.ops.kernels import cpu
from hvd_compress.ops.totals import QuantizedSum, SparseSum

Floats: TypeAlias = npt.NDArray[np.float32]
Integers: TypeAlias = npt.NDArray[np.int64]

PART = 2**17
"""Coordinates per part."""


class Places(NamedTuple):
    """Destinations of the pieces of a sum.

    Attributes:
        begins: Start of each piece in the sum.
        ends: End of each piece in the sum.
        addresses: Addresses of the float32 tensors that they are written to.
    """

    begins: Integers
    ends: Integers
    addresses: Integers

    @classmethod
    def of(cls, pieces: Sequence[tuple[slice, Any]]) -> Places:
        """Return the destinations in contiguous tensors."""
        spans = [span for span, _ in pieces]
        addresses = np.array([to.data_ptr() for _, to in pieces])
        return cls(np.array([span.start for span in spans]), np.array([span.stop for span in spans]), addresses)

    def write(self, part: Floats, first: int, factor: float) -> bool:
        """Write a part of the sum, which starts at ``first``, times a factor; return whether all of it is finite."""
        last = first + part.size
        here = (self.begins < last) & (self.ends > first)
        begins, ends = self.begins[here], np.minimum(self.ends[here], last)
        starts = np.maximum(begins, first)
        return cpu.deliver(part, starts - first, self.addresses[here] + 4 * (starts - begins), ends - starts, factor)


def deliver_parts(total: SparseSum | QuantizedSum, pieces: Sequence[tuple[slice, Any]], factor: float) -> bool:
    """Decode a float32 sum, and write its pieces, times a factor, to contiguous CPU tensors.

    Returns:
        Whether all that was written is finite.
    """
    finite = True
    decode, places = _Scatter(total) if isinstance(total, SparseSum) else _Decode(total), Places.of(pieces)
    memory = np.empty(min(PART, total.size), np.float32)
    for first in range(0, total.size, PART):
        part = memory[: min(PART, total.size - first)]
        decode(part, first)
        finite &= places.write(part, first, factor)
    return finite


class _Scatter:
    def __init__(self, total: SparseSum) -> None:
        self._pieces = [(indices.numpy(), values.float().numpy()) for indices, values in total.pieces]

    def __call__(self, out: Floats, first: int) -> None:
        out.fill(0)
        for indices, values in self._pieces:
            low, high = np.searchsorted(indices, (first, first + out.size))
            cpu.add_at(out, indices[low:high] - first, values[low:high])


class _Decode:
    def __init__(self, total: QuantizedSum) -> None:
        self._rows = total.rows.contiguous().numpy()
        self._how = total.code, total.n, total.join

    def __call__(self, out: Floats, first: int) -> None:
        cpu.dequantise(self._rows, *self._how, out, (first, first + out.size))
