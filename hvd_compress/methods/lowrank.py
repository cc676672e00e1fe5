"""Base class of low-rank methods: gradients as matrices, and their factors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.method import Method, check_range, check_whole
from hvd_compress.ops import Ops, mix_seed
from hvd_compress.ops.arrays import Array, Shape


class Factor(NamedTuple):
    """Matrix dimensions of a gradient, and the rank of its approximation."""

    rows: int
    columns: int
    rank: int


@dataclass(frozen=True)
class LowRank(Method):
    """Approximate each matrix M of a bucket by ``P Q^T``. Factors of all matrices are concatenated, flat, row by row.

    Args:
        rank: Rank r of the approximation, limited to the smaller dimension of the matrix.
        target_ratio: If above 0, replaces ``rank`` by a rank per matrix: the largest one (at least 1) whose factors are
            this many times smaller than the matrix.
        min_gain: Compress a matrix only if its factors are at least this many times smaller; 0 compresses all.
        seed: Random seed of the initial factors, the same on all ranks.
    """

    family = "low-rank"
    feedback = True
    retains = True
    matrixwise = True

    rank: int = 4
    target_ratio: float = 0.0
    min_gain: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("rank", self.rank, 1, 2**16)
        check_range(
            "target_ratio", self.target_ratio, "0, or at least 1", self.target_ratio == 0 or self.target_ratio >= 1
        )
        check_range("min_gain", self.min_gain, "at least 0", self.min_gain >= 0)
        check_range("seed", self.seed, "in 0 .. 2**32-1", 0 <= self.seed < 2**32)

    def factor(self, shape: Shape) -> Factor:
        """View a shape as a matrix: split its axes where the factors are smallest (a vector is one row).

        This separates the output channels of a convolution, first axis or last, from the rest.
        """
        cuts = [(math.prod(shape[:axis]), math.prod(shape[axis:])) for axis in range(1, len(shape))]
        rows, columns = min(cuts, key=sum, default=(1, math.prod(shape)))
        rank = self.rank
        if self.target_ratio:
            rank = max(1, int(rows * columns / (self.target_ratio * (rows + columns))))
        return Factor(rows, columns, min(rank, rows, columns))

    def compresses(self, shape: Shape) -> bool:
        f = self.factor(shape)
        return len(shape) > 1 and f.rows * f.columns >= self.min_gain * f.rank * (f.rows + f.columns)

    @property
    def too_small(self) -> str:
        return (
            f"factors of this rank are not {self.min_gain:g} times smaller: take a smaller rank or min_gain (0 for"
            " all), or a method that does not need large matrices, such as int8 or topk"
        )

    def factors(self, bucket: Bucket) -> list[Factor]:
        """Return the matrix dimensions and ranks of all gradients of a bucket."""
        return [self.factor(shape) for shape in bucket.shapes]

    def matrices(self, ops: Ops, bucket: Bucket, x: Array) -> list[Array]:
        """Split a flat bucket into matrices."""
        pieces = ops.split(x, bucket.sizes)
        return [ops.reshape(m, (f.rows, f.columns)) for m, f in zip(pieces, self.factors(bucket), strict=True)]

    def left(self, ops: Ops, bucket: Bucket, flat: Array) -> list[Array]:
        """Split an array into the left factors, each of shape ``(rows, rank)``."""
        return self._cut(ops, bucket, flat, [f.rows for f in self.factors(bucket)])

    def right(self, ops: Ops, bucket: Bucket, flat: Array) -> list[Array]:
        """Split an array into the right factors, each of shape ``(columns, rank)``."""
        return self._cut(ops, bucket, flat, [f.columns for f in self.factors(bucket)])

    def _cut(self, ops: Ops, bucket: Bucket, flat: Array, lengths: list[int]) -> list[Array]:
        factors = self.factors(bucket)
        parts = ops.split(flat, [n * f.rank for n, f in zip(lengths, factors, strict=True)])
        return [ops.reshape(part, (-1, f.rank)) for part, f in zip(parts, factors, strict=True)]

    def lengths(self, bucket: Bucket, side: str) -> list[int]:
        """Return the sizes of all factors of one side (``"left"`` or ``"right"``)."""
        return [(f.rows if side == "left" else f.columns) * f.rank for f in self.factors(bucket)]

    def draw(self, ops: Ops, bucket: Bucket, side: str) -> Array:
        """Draw normally distributed factors of one side (``"left"`` or ``"right"``) from a separate generator."""
        size = sum(self.lengths(bucket, side))
        rng = np.random.default_rng(mix_seed(self.seed, bucket.seed, *([1] if side == "left" else [])))
        return ops.constant(rng.standard_normal(size).astype(bucket.dtype))


def flat(ops: Ops, parts: list[Array]) -> Array:
    """Concatenate matrices into one flat array."""
    return ops.concat([ops.reshape(part, (-1,)) for part in parts])
