"""Lossless homomorphic compression: exact sums of gradients that are sparse already."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress.bucket import Bucket, Shape
from hvd_compress.collectives import AllReduce, Array, Branch, Exchange, Exchanging, SaturatingSum, World
from hvd_compress.methods.base import Counted, Method, check_range, count
from hvd_compress.ops import Ops, mix_seed
from hvd_compress.ops.numpy import hash_indices
from hvd_compress.ops.packing import pack, unpack

Arr = npt.NDArray[Any]

HASHES = 3
"""Cells of a key, each in a table of its own, so that they differ."""

ATTEMPTS = 8
"""How many hashes are tried until one can be peeled."""

SLACK = 8
"""Cells that each table has besides what the load asks for: few keys get into each other's way more easily."""

CROWD = 5
"""A cell has at most ``2**CROWD`` keys, so that its sum has this many bits more than a value."""


@dataclass(frozen=True)
class Homomorphic(Method):
    """A bitmap of what is not zero, merged by OR, and a sketch of the values, merged by addition.

    For gradients that are mostly zero on all ranks, as of embeddings and behind ReLUs. With U the coordinates that are
    not zero on some rank, h_1, h_2, h_3 hashes into a table of cells each, and u a power of two::

        U = {j : x_i[j] != 0 for some i}                                   (saturating sum, 1 bit per coordinate)
        m = max_i max_j |x_i[j]|                                           (allreduce MAX, one number)
        s[h_a(j)] = sum_i sum_{j in U} round(x_i[j] / u),  a = 1, 2, 3     (allreduce SUM, 64 bits per cell)

    Everyone knows U and so peels: a cell with a single key left tells the sum of that key, which is subtracted from its
    other two cells, and so on. All values come out with high probability as long as there are fewer than 0.818 keys per
    cell. As peeling depends on U alone, it is rehearsed before the sketch is made (ours), with up to 8 hashes one after
    another, of which single ones fail in up to 6% of the cases with a hundred keys and ``6 / keys`` with many. Where U
    is larger than expected, or no hash will do, the gradient is sent as it is, so the result is right in any case.

    Integers add exactly in any order (ours; the paper adds floats), and no cell can overflow: with n ranks and m < 2^e,
    ``u = 2^(e - b)`` with ``b = 57 - ceil(log2 n)``. So the total is the exact sum of float32 values, correctly
    rounded, where they are zero or at least ``2^(24 - b) m``, with 8 ranks about 1e-9 m; smaller ones are off by
    ``u / 2 <= 2^-b m`` at most on each rank, and so are float64 values.

    With a rank's part of the bitmap sent and the whole received, that makes about ``2 + 64 density / load`` bits per
    coordinate, and 2 to find out that a gradient is too dense.

    Args:
        density: Largest share of the coordinates that are not zero on some rank, in (0, 1].
        load: Keys per cell at that density, in (0, 0.8]; each of the three tables has 8 cells besides.
        seed: Of the hashes, the same on all ranks.
    """

    name = "homomorphic"
    paper = "Li et al., Accelerating Distributed Deep Learning using Lossless Homomorphic Compression, 2024"
    collective = "saturating sum, allreduce (max), allreduce"
    keeps = "step count"
    unbiasedness = "exact"

    density: float = 0.05
    load: float = 0.75
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("density", self.density, "in (0, 1]", 0 < self.density <= 1)
        check_range("load", self.load, "in (0, 0.8]", 0 < self.load <= 0.8)
        check_range("seed", self.seed, "in 0 .. 2**32-1", 0 <= self.seed < 2**32)

    def compresses(self, shape: Shape) -> bool:
        bucket = Bucket("", (shape,), "float32")
        return 8 * self.sketch(bucket, 1).cells + bucket.numel / 4 < 4 * bucket.numel

    def sketch(self, bucket: Bucket, size: int) -> Sketch:
        """The sketch of a bucket, to be summed over ``size`` ranks."""
        keys = count(self.density, bucket.numel)
        table = math.ceil(keys / self.load / HASHES) + SLACK
        return Sketch(keys, table, 62 - CROWD - (size - 1).bit_length(), bucket.dtype)

    def init(self, ops: Ops, bucket: Bucket, size: int) -> Counted:
        return Counted(step=0)

    def exchange(self, ops: Ops, bucket: Bucket, x: Array, state: Counted, world: World) -> Exchanging:
        sketch = self.sketch(bucket, world.size)
        packed = yield SaturatingSum(pack(ops, ops.cast(x != 0, "uint8"), 1), bits=1, zero=0)
        union = unpack(ops, packed, 1, bucket.numel)
        seed = ops.seed(self.seed, bucket.seed, state.step)
        keys = ops.below(seed, ops.constant(np.full(ATTEMPTS, 2**31 - 1)))
        key = ops.on_host(sketch.rehearse, "int64", (1,), union, keys)

        branches = (partial(_sketched, ops, x, sketch, union, key), partial(_dense, x))
        taken = yield Branch(ops.cast(key[0] < 0, "int32"), branches)
        return Exchange(taken.total, None, Counted(state.step + 1))


class Sketch(NamedTuple):
    """Where keys lie in a sketch, and how. All of its functions are for numpy.

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
        indices = np.flatnonzero(union)
        if indices.size <= self.capacity:
            for key in keys.tolist():
                cells = self._places(indices, key)
                crowd = np.bincount(cells.ravel(), minlength=1).max()
                if crowd <= 2**CROWD and sum(alone.size for alone, _ in self._peel(cells)) == indices.size:
                    return int(key)
        return -1

    def write(self, union: Arr, key: Arr, peak: Arr, x: Arr) -> Arr:
        """The sketch of an array whose largest magnitude on any rank is ``peak``."""
        indices = np.flatnonzero(union)
        values = np.rint(np.ldexp(x[indices].astype(np.float64), -self._unit(peak))).astype(np.int64)
        sums = np.zeros(self.cells, np.int64)
        np.add.at(sums, self._places(indices, int(key[0])), values[:, None])
        return sums

    def read(self, union: Arr, key: Arr, peak: Arr, sums: Arr) -> Arr:
        """Undo `write`, also of a sum of sketches."""
        indices, sums = np.flatnonzero(union), sums.copy()
        cells, values = self._places(indices, int(key[0])), np.zeros(indices.size, np.int64)
        for alone, where in self._peel(cells):
            values[alone] = sums[where]
            np.subtract.at(sums, cells[alone], values[alone, None])
        x = np.zeros(union.size, self.dtype)
        with np.errstate(over="ignore"):  # a sum of finite numbers may be inf
            x[indices] = np.ldexp(values.astype(self.dtype), self._unit(peak))
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


def _sketched(ops: Ops, x: Array, sketch: Sketch, union: Array, key: Array) -> Exchanging:
    """Sum by sketches, given a key by which they can be peeled."""
    peak = yield AllReduce(ops.reshape(ops.absmax(x), (1,)), op="max")
    mine = ops.on_host(sketch.write, "int64", (sketch.cells,), union, key, peak, x)
    sums = yield AllReduce(mine, donate=True)
    total = ops.on_host(sketch.read, sketch.dtype, (int(x.shape[0]),), union, key, peak, sums)
    return Exchange(total, None, ())


def _dense(x: Array) -> Exchanging:
    return Exchange((yield AllReduce(x, donate=True)), None, ())
