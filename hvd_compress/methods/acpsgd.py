"""ACP-SGD: low-rank gradients by half a power iteration per step, with one allreduce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllReduce, Exchange, Exchanging, World
from hvd_compress.core.method import Card, Example, register
from hvd_compress.core.state_tree import Factors
from hvd_compress.methods.lowrank import LowRank, flat
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.totals import LowRankSum


class ACPSGDState(NamedTuple):
    """State of ACP-SGD.

    Attributes:
        step: Number of exchanges so far; its parity selects the factor to update.
        p: Left factors of all matrices of the bucket, flat, row by row.
        q: Right factors, likewise.
    """

    step: int
    p: Factors
    q: Factors


@register
@dataclass(frozen=True)
class ACPSGD(LowRank):
    """Alternating low-rank compression: update P and Q in turn, with one allreduce per step (Algorithm 1).

    For each gradient as a matrix M_i (see `LowRank.factor`)::

        even steps:  Q = orthogonalise(Q)     P = sum_i M_i Q         e_i = M_i - (M_i Q) Q^T
        odd steps:   P = orthogonalise(P)     Q = sum_i M_i^T P       e_i = M_i - P (M_i^T P)^T
        total = P Q^T

    Vectors, and matrices below ``min_gain``, are not compressed.

    Args:
        rank: Rank r of the approximation, limited to the smaller dimension of the matrix.
        target_ratio: If above 0, replaces ``rank`` by a rank per matrix: the largest one (at least 1) whose factors are
            this many times smaller than the matrix.
        min_gain: Compress a matrix only if both factors together are at least this many times smaller; 0 compresses
            all. Each step sends only one factor.
        seed: Random seed of the initial factors, the same on all ranks.
    """

    name = "acpsgd"
    card = Card(
        paper="Zhang et al., Evaluation and Optimization of Gradient Compression for Distributed Deep Learning, 2023",
        collective="allreduce",
        keeps="P and Q, r x (rows + columns)",
        examples=(Example("acpsgd:rank=2", 2 * 40 * 4, gain=20),),  # the left factors in the first step
        compared=("acpsgd:rank=64", "acpsgd:rank=16", "acpsgd:rank=4"),
        learns=True,
    )

    def init(self, ops: Ops, bucket: Bucket, world: World) -> ACPSGDState:
        return ACPSGDState(0, self.draw(ops, bucket, "left"), self.draw(ops, bucket, "right"))

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: ACPSGDState, world: World, return_error: bool = False
    ) -> Exchanging:
        ms = self.matrices(ops, bucket, x)

        if state.step % 2 == 0:
            qs = [ops.orthogonalise(q) for q in self.right(ops, bucket, state.q)]
            mine = [ops.project(m, q) for m, q in zip(ms, qs, strict=True)]
            p = yield AllReduce(flat(ops, mine))
            total = LowRankSum(self.left(ops, bucket, p), qs)
            error = ops.subtract_products(x, mine, qs) if return_error else None
            return Exchange(total, ACPSGDState(state.step + 1, p / world.size, flat(ops, qs)), error)

        ps = [ops.orthogonalise(p) for p in self.left(ops, bucket, state.p)]
        mine = [ops.project_back(m, p) for m, p in zip(ms, ps, strict=True)]
        q = yield AllReduce(flat(ops, mine))
        total = LowRankSum(ps, self.right(ops, bucket, q))
        error = ops.subtract_products(x, ps, mine) if return_error else None
        return Exchange(total, ACPSGDState(state.step + 1, flat(ops, ps), q / world.size), error)
