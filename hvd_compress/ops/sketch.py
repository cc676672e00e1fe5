"""Count sketches of sparse arrays in numpy, the reference for kernels; see `hvd_compress.methods.homomorphic`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress.ops import mix_seed
from hvd_compress.ops.hashing import hash_indices

Arr = npt.NDArray[Any]

HASHES = 3
"""Cells per key, each in a separate table, so that they differ."""

CROWD = 5
"""Extra bits of the sum of a cell, which holds at most ``2**CROWD`` keys."""


class Sketch(NamedTuple):
    """Layout of a sketch.

    Attributes:
        capacity: Maximum number of keys.
        table: Cells per table.
        bits: Bits of a value, an integer of at most ``2**bits``.
        dtype: Dtype of the encoded numbers.
    """

    capacity: int
    table: int
    bits: int
    dtype: str

    @property
    def cells(self) -> int:
        """Number of cells of all tables."""
        return HASHES * self.table

    def rehearse(self, union: Arr, keys: Arr) -> int:
        """Return the first hash key with which a bitmap of coordinates can be peeled; -1 if there is none."""
        if np.count_nonzero(union) <= self.capacity:
            indices = np.flatnonzero(union)
            for key in keys.tolist():
                cells = self._places(indices, key)
                crowd = np.bincount(cells.ravel(), minlength=1).max()
                if crowd <= 2**CROWD and sum(alone.size for alone, _ in self._peel(cells)) == indices.size:
                    return int(key)
        return -1

    def write(self, union: Arr, key: Arr, peak: Arr, x: Arr) -> Arr:
        """Return the sketch of an array whose largest magnitude on any rank is ``peak``."""
        indices = np.flatnonzero(union)
        sums = np.zeros(self.cells, np.int64)
        np.add.at(sums, self._places(indices, int(key[0])), self.integers(x[indices], peak)[:, None])
        return sums

    def read(self, union: Arr, key: Arr, peak: Arr, sums: Arr) -> Arr:
        """Undo `write`, also for a sum of sketches."""
        indices, sums = np.flatnonzero(union), sums.copy()
        cells, values = self._places(indices, int(key[0])), np.zeros(indices.size, np.int64)
        for alone, where in self._peel(cells):
            values[alone] = sums[where]
            np.subtract.at(sums, cells[alone], values[alone, None])
        x = np.zeros(union.size, self.dtype)
        x[indices] = self.floats(values, peak)
        return x

    def integers(self, x: Arr, peak: Arr) -> Arr:
        """Convert numbers to integers, in a unit that depends on ``peak``."""
        whole: Arr = np.rint(np.ldexp(x.astype(np.float64), -self._unit(peak)))
        return whole.astype(np.int64)

    def floats(self, values: Arr, peak: Arr) -> Arr:
        """Undo `integers`, also for sums."""
        with np.errstate(over="ignore"):  # a sum of finite numbers may be inf
            x: Arr = np.ldexp(values.astype(self.dtype), self._unit(peak))
        return x

    def _unit(self, peak: Arr) -> int:
        """Return the binary logarithm of the value of integer 1."""
        return math.frexp(peak[0])[1] - self.bits

    def _places(self, indices: Arr, key: int) -> Arr:
        """Return the cells of each index, shape ``(n, HASHES)``."""
        hashes = [hash_indices(mix_seed(key, number), indices).astype(np.int64) for number in range(HASHES)]
        return np.stack([(h * self.table >> 32) + self.table * number for number, h in enumerate(hashes)], axis=1)

    def _peel(self, cells: Arr) -> Iterator[tuple[Arr, Arr]]:
        """Yield the keys that are alone in a cell, with these cells, and remove them, round by round."""
        left = np.bincount(cells.ravel(), minlength=self.cells)
        names = np.zeros(self.cells, np.int64)  # sum of the remaining keys in each cell
        np.add.at(names, cells, np.arange(len(cells))[:, None])
        where = np.flatnonzero(left == 1)
        while where.size:
            alone, first = np.unique(names[where], return_index=True)
            yield alone, where[first]
            np.subtract.at(left, cells[alone], 1)
            np.subtract.at(names, cells[alone], alone[:, None])
            touched = cells[alone].ravel()
            where = touched[left[touched] == 1]
