"""Second moments of gradients, in the factors of Adafactor.

A gradient is a matrix of its first axis and all others, and keeps the running means of its squares over each row and
over each column; a vector keeps those of all coordinates. Behind these is their weight: the running mean of ones, by
which running means that began at zero are divided.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hvd_compress.ops.arrays import Shape

EPSILON = 1e-8
"""Added to the root of the second moment, as in Adam."""

LARGEST = 1e15
"""Larger magnitudes count as this, so that sums of squares stay within float32."""


class Sides(NamedTuple):
    """Rows and columns of a gradient; a vector has one column."""

    rows: int
    columns: int


def sides_of(shape: Shape) -> Sides:
    """Return a gradient's shape as a matrix; as a vector if one side of that would be 1."""
    numel = math.prod(shape)
    rows = shape[0] if len(shape) > 1 else numel
    return Sides(rows, numel // rows) if 1 < rows < numel else Sides(numel, 1)


def size_of(sides: Sides) -> int:
    """Return how many numbers are kept of a gradient."""
    return sides.rows + (sides.columns if sides.columns > 1 else 0) + 1
