"""PowerSGD: low-rank gradients by one step of power iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hvd_compress.bucket import Bucket, Shape
from hvd_compress.collectives import AllReduce, Array, Exchange, Exchanging, World
from hvd_compress.methods.base import Method, check_range
from hvd_compress.ops import Ops, mix_seed


class PowerSGDState(NamedTuple):
    """What PowerSGD keeps.

    Attributes:
        q: The right factors of all matrices of the bucket, flat, row by row: the warm start of the next step.
    """

    q: Array


class Factor(NamedTuple):
    """A gradient as a matrix of ``rows x columns`` and the rank of its approximation."""

    rows: int
    columns: int
    rank: int


@dataclass(frozen=True)
class PowerSGD(Method):
    """Rank-r approximation with warm start (Algorithm 1 of the paper), two rounds for all matrices together.

    For each gradient as a matrix M_i (see `factor`), Q from the step before::

        Q = orthogonalise(Q)                        (ours: the same space, better conditioned)
        P = sum_i M_i Q                             (allreduce)
        P = orthogonalise(P)
        Q = sum_i M_i^T P                           (allreduce)
        total = P Q^T                               e_i = M_i - P (M_i^T P)^T

    It is exact where the sum has rank r or less. Vectors, and matrices that would not get smaller by `min_gain`, go
    uncompressed.

    Args:
        rank: Rank r of the approximation; at most what the matrix has.
        min_gain: How many times smaller the factors must be for a matrix to be compressed; 0 compresses all.
        seed: Of the first Q, the same on all ranks.
    """

    name = "powersgd"
    paper = "Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression, 2019"
    collective = "2 allreduces"
    keeps = "Q, r x columns"
    feedback = True

    rank: int = 4
    min_gain: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("rank", self.rank, "a whole number of at least 1", self.rank >= 1)
        check_range("min_gain", self.min_gain, "at least 0", self.min_gain >= 0)
        check_range("seed", self.seed, "in 0 .. 2**32-1", 0 <= self.seed < 2**32)

    def factor(self, shape: Shape) -> Factor:
        """Read a shape as a matrix: cut between the two axes where the factors are smallest (a vector is one row).

        That separates the output channels of a convolution from the rest, be they the first axis or the last.
        """
        cuts = [(math.prod(shape[:axis]), math.prod(shape[axis:])) for axis in range(1, len(shape))]
        rows, columns = min(cuts, key=sum, default=(1, math.prod(shape)))
        return Factor(rows, columns, min(self.rank, rows, columns))

    def compresses(self, shape: Shape) -> bool:
        f = self.factor(shape)
        return len(shape) > 1 and f.rows * f.columns >= self.min_gain * f.rank * (f.rows + f.columns)

    def init(self, ops: Ops, bucket: Bucket) -> PowerSGDState:
        """Draw Q from a normal distribution, from a generator of its own."""
        size = sum(f.columns * f.rank for f in map(self.factor, bucket.shapes))
        draw = np.random.default_rng(mix_seed(self.seed, bucket.seed)).standard_normal(size)
        return PowerSGDState(ops.constant(draw.astype(bucket.dtype)))

    def exchange(self, ops: Ops, bucket: Bucket, x: Array, state: PowerSGDState, world: World) -> Exchanging:
        factors = [self.factor(shape) for shape in bucket.shapes]
        pieces = ops.split(x, bucket.sizes)
        ms = [ops.reshape(m, (f.rows, f.columns)) for m, f in zip(pieces, factors, strict=True)]

        def flat(parts: list[Array]) -> Array:
            return ops.concat([ops.reshape(part, (-1,)) for part in parts])

        def matrices(joined: Array, rows: list[int]) -> list[Array]:
            parts = ops.split(joined, [n * f.rank for n, f in zip(rows, factors, strict=True)])
            return [ops.reshape(part, (-1, f.rank)) for part, f in zip(parts, factors, strict=True)]

        qs = [ops.orthogonalise(q) for q in matrices(state.q, [f.columns for f in factors])]
        summed = yield AllReduce(flat([m @ q for m, q in zip(ms, qs, strict=True)]), donate=True)
        ps = [ops.orthogonalise(p) for p in matrices(summed, [f.rows for f in factors])]

        mine = [ops.transpose(m) @ p for m, p in zip(ms, ps, strict=True)]
        q = yield AllReduce(flat(mine))

        qs = matrices(q, [f.columns for f in factors])
        total = flat([p @ ops.transpose(q) for p, q in zip(ps, qs, strict=True)])
        return Exchange(total, (ps, mine), PowerSGDState(q / world.size))

    def retain(self, ops: Ops, corrected: Array, sent: tuple[list[Array], list[Array]]) -> Array:
        parts = [ops.reshape(p @ ops.transpose(q), (-1,)) for p, q in zip(*sent, strict=True)]
        return corrected - ops.concat(parts)
