"""PowerSGD: low-rank gradients by power iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllReduce, Exchange, Exchanging, World
from hvd_compress.core.method import Card, Example, check_whole, register
from hvd_compress.core.state_tree import Factors
from hvd_compress.methods.lowrank import LowRank, flat
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.totals import LowRankSum


class PowerSGDState(NamedTuple):
    """State of PowerSGD.

    Attributes:
        q: Right factors of all matrices of the bucket, flat, row by row: the warm start of the next step.
    """

    q: Factors


@register
@dataclass(frozen=True)
class PowerSGD(LowRank):
    """Rank-r approximation with warm start (Algorithm 1 of the paper): two allreduces for all matrices together.

    For each gradient as a matrix M_i (see `LowRank.factor`), with Q from the previous step::

        Q = orthogonalise(Q)                        (ours: same span, better conditioned)
        P = sum_i M_i Q                             (allreduce)
        P = orthogonalise(P)
        Q = sum_i M_i^T P                           (allreduce)
        total = P Q^T                               e_i = M_i - P (M_i^T P)^T

    It is exact if the sum has rank r or less. Vectors, and matrices below ``min_gain``, are not compressed.

    Args:
        rank: Rank r of the approximation, limited to the smaller dimension of the matrix.
        target_ratio: If above 0, replaces ``rank`` by a rank per matrix: the largest one (at least 1) whose factors are
            this many times smaller than the matrix.
        min_gain: Compress a matrix only if its factors are at least this many times smaller; 0 compresses all.
        seed: Random seed of the initial Q, the same on all ranks.
        iterations: Power iterations per step, each with two allreduces. The authors find more iterations better than a
            higher rank, as the cost of orthogonalisation grows with r^2.
    """

    name = "powersgd"
    card = Card(
        paper="Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression, 2019",
        collective="2 allreduces",
        keeps="Q, r x columns",
        examples=(
            Example("powersgd:rank=2", 2 * (40 + 25) * 4),
            Example("powersgd:target_ratio=3,iterations=2", 2 * 5 * (40 + 25) * 4),
        ),
        lossless=("powersgd:rank=99",),
        compared=("powersgd:rank=32", "powersgd:rank=8", "powersgd:rank=2"),
        learns=True,
    )
    boundary = True

    iterations: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("iterations", self.iterations, 1, 100)

    def init(self, ops: Ops, bucket: Bucket, world: World) -> PowerSGDState:
        return PowerSGDState(self.draw(ops, bucket, "right"))

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: PowerSGDState, world: World, return_error: bool = False
    ) -> Exchanging:
        ms, q = self.matrices(ops, bucket, x), state.q
        for _ in range(self.iterations):
            qs = [ops.orthogonalise(q) for q in self.right(ops, bucket, q)]
            summed = yield AllReduce(flat(ops, [ops.project(m, q) for m, q in zip(ms, qs, strict=True)]), donate=True)
            ps = [ops.orthogonalise(p) for p in self.left(ops, bucket, summed)]
            mine = [ops.project_back(m, p) for m, p in zip(ms, ps, strict=True)]
            q = yield AllReduce(flat(ops, mine))

        total = LowRankSum(ps, self.right(ops, bucket, q))
        error = ops.subtract_products(x, ps, mine) if return_error else None
        return Exchange(total, PowerSGDState(q / world.size), error)
