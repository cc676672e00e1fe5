"""Count-sketches of sparse arrays in numpy: the oracle for kernels; see `hvd_compress.methods.homomorphic`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress.ops import mix_seed
from hvd_compress.ops.numpy import hash_indices

Arr = npt.NDArray[Any]

HASHES = 3
"""Cells of a key, each in a table of its own, so that they differ."""

CROWD = 5
"""A cell has at most ``2**CROWD`` keys, so that its sum has this many bits more than a value."""


class Sketch(NamedTuple):
    """Where keys lie in a sketch, and how.

    Attributes:
        capacity: How many keys it is made for.
        table: Cells in each of its tables.
        bits: A value is an integer of at most ``2**bits``.
        dtype: Of the numbers that it stands for.
    """

    capacity: int
    table: int
    bits: int
    dtype: str

    @property
    def cells(self) -> int:
        """Cells of all tables."""
        return HASHES * self.table

    def rehearse(self, union: Arr, keys: Arr) -> int:
        """The first of several hash keys by which a bitmap of coordinates can be peeled; -1 if there is none."""
        if np.count_nonzero(union) <= self.capacity:
            indices = np.flatnonzero(union)
            for key in keys.tolist():
                cells = self._places(indices, key)
                crowd = np.bincount(cells.ravel(), minlength=1).max()
                if crowd <= 2**CROWD and sum(alone.size for alone, _ in self._peel(cells)) == indices.size:
                    return int(key)
        return -1

    def write(self, union: Arr, key: Arr, peak: Arr, x: Arr) -> Arr:
        """The sketch of an array whose largest magnitude on any rank is ``peak``."""
        indices = np.flatnonzero(union)
        sums = np.zeros(self.cells, np.int64)
        np.add.at(sums, self._places(indices, int(key[0])), self.integers(x[indices], peak)[:, None])
        return sums

    def read(self, union: Arr, key: Arr, peak: Arr, sums: Arr) -> Arr:
        """Undo `write`, also of a sum of sketches."""
        indices, sums = np.flatnonzero(union), sums.copy()
        cells, values = self._places(indices, int(key[0])), np.zeros(indices.size, np.int64)
        for alone, where in self._peel(cells):
            values[alone] = sums[where]
            np.subtract.at(sums, cells[alone], values[alone, None])
        x = np.zeros(union.size, self.dtype)
        x[indices] = self.floats(values, peak)
        return x

    def integers(self, x: Arr, peak: Arr) -> Arr:
        """Numbers as integers, in units that depend on ``peak``."""
        whole: Arr = np.rint(np.ldexp(x.astype(np.float64), -self._unit(peak)))
        return whole.astype(np.int64)

    def floats(self, values: Arr, peak: Arr) -> Arr:
        """Undo `integers`, also of sums."""
        with np.errstate(over="ignore"):  # a sum of finite numbers may be inf
            x: Arr = np.ldexp(values.astype(self.dtype), self._unit(peak))
        return x

    def _unit(self, peak: Arr) -> int:
        """The binary logarithm of what the integer 1 stands for."""
        return math.frexp(peak[0])[1] - self.bits

    def _places(self, indices: Arr, key: int) -> Arr:
        """The cells of each index, shape ``(n, HASHES)``."""
        hashes = [hash_indices(mix_seed(key, number), indices).astype(np.int64) for number in range(HASHES)]
        return np.stack([(h * self.table >> 32) + self.table * number for number, h in enumerate(hashes)], axis=1)

    def _peel(self, cells: Arr) -> Iterator[tuple[Arr, Arr]]:
        """Round by round, which keys are alone in a cell, and in which; then they are taken away."""
        left = np.bincount(cells.ravel(), minlength=self.cells)
        names = np.zeros(self.cells, np.int64)  # in each cell, the sum of the keys that are left
        np.add.at(names, cells, np.arange(len(cells))[:, None])
        where = np.flatnonzero(left == 1)
        while where.size:
            alone, first = np.unique(names[where], return_index=True)
            yield alone, where[first]
            np.subtract.at(left, cells[alone], 1)
            np.subtract.at(names, cells[alone], alone[:, None])
            touched = cells[alone].ravel()
            where = touched[left[touched] == 1]
