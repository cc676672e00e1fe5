"""Buckets of gradients."""

from __future__ import annotations

import math
import zlib
from functools import cache
from typing import NamedTuple

from hvd_compress.ops.arrays import Shape


@cache
def _sizes(shapes: tuple[Shape, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape) for shape in shapes)


class Bucket(NamedTuple):
    """Ordered gradients that are compressed and exchanged together; equal on all ranks.

    Element-wise methods see the flat concatenation of the gradients; low-rank methods split it by ``shapes``.

    Attributes:
        key: Name of the bucket, unique within its plan; part of the names of its collectives.
        shapes: Shapes of the gradients, in order.
        dtype: Dtype that the method computes in: ``"float32"`` or ``"float64"``.
    """

    key: str
    shapes: tuple[Shape, ...]
    dtype: str

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements of each gradient."""
        return _sizes(self.shapes)

    @property
    def numel(self) -> int:
        """Total number of elements."""
        return sum(self.sizes)

    @property
    def seed(self) -> int:
        """32-bit seed derived from the key, so that buckets draw different random numbers."""
        return zlib.crc32(self.key.encode())
