"""Split arrays into blocks that have separate scales."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array


class Blocks(NamedTuple):
    """Partition of an array into blocks.

    Attributes:
        n: Number of coordinates.
        number: Number of blocks.
        size: Coordinates per block; the last block is padded with zeros.
    """

    n: int
    number: int
    size: int

    @classmethod
    def of(cls, n: int, largest: int) -> Blocks:
        """Return blocks of ``largest`` coordinates, or one block if the array is smaller."""
        size = max(1, min(n, largest))
        return cls(n, -(-n // size), size)

    def cut(self, ops: Ops, x: Array) -> Array:
        """Reshape ``(n,)`` to ``(number, size)``."""
        return ops.reshape(ops.pad(x, self.number * self.size), (self.number, self.size))

    def join(self, ops: Ops, rows: Array) -> Array:
        """Undo `cut`."""
        return ops.reshape(rows, (-1,))[: self.n]

    def members(self, ops: Ops, dtype: str) -> Array:
        """Return the number of coordinates of each block without padding, shape ``(number,)``."""
        starts = np.arange(self.number) * self.size
        return ops.constant(np.clip(self.n - starts, 1, self.size).astype(dtype))

    def column(self, ops: Ops, values: Array) -> Array:
        """Reshape one value per block to broadcast over the rows."""
        return ops.reshape(values, (self.number, 1))
