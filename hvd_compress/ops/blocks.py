"""Arrays cut into blocks, each of which has a scale of its own."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hvd_compress.core.collectives import Array
from hvd_compress.ops import Ops


class Blocks(NamedTuple):
    """An array of n coordinates cut into ``number`` blocks of ``size``.

    Attributes:
        n: Coordinates.
        number: Blocks.
        size: Coordinates in a block; the last one is filled up with zeros.
    """

    n: int
    number: int
    size: int

    @classmethod
    def of(cls, n: int, largest: int) -> Blocks:
        """Blocks of ``largest``, or one block if the array is smaller."""
        size = max(1, min(n, largest))
        return cls(n, -(-n // size), size)

    def cut(self, ops: Ops, x: Array) -> Array:
        """Shape ``(n,)`` to ``(number, size)``."""
        return ops.reshape(ops.pad(x, self.number * self.size), (self.number, self.size))

    def join(self, ops: Ops, rows: Array) -> Array:
        """Undo `cut`."""
        return ops.reshape(rows, (-1,))[: self.n]

    def members(self, ops: Ops, dtype: str) -> Array:
        """How many coordinates each block really has, shape ``(number,)``."""
        starts = np.arange(self.number) * self.size
        return ops.constant(np.clip(self.n - starts, 1, self.size).astype(dtype))

    def column(self, ops: Ops, values: Array) -> Array:
        """One value for each block, shaped to go with the rows."""
        return ops.reshape(values, (self.number, 1))
