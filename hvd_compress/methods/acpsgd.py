"""ACP-SGD: low-rank gradients by half a step of power iteration, in one round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllReduce, Array, Branch, Exchange, Exchanging, World
from hvd_compress.core.state_tree import Factors
from hvd_compress.core.totals import Products
from hvd_compress.methods.base import Example, register
from hvd_compress.methods.lowrank import LowRank, flat
from hvd_compress.ops import Ops


class ACPSGDState(NamedTuple):
    """State of ACP-SGD.

    Attributes:
        step: How many exchanges there were; tells which factor is next.
        p: The left factors of all matrices of the bucket, flat, row by row.
        q: The right factors.
    """

    step: int | Array
    p: Factors
    q: Factors


@register
@dataclass(frozen=True)
class ACPSGD(LowRank):
    """Alternating compression: P and Q take turns, with one allreduce in each step (Algorithm 1 of the paper).

    For each gradient as a matrix M_i (see `LowRank.factor`)::

        even steps:  Q = orthogonalise(Q)     P = sum_i M_i Q         e_i = M_i - (M_i Q) Q^T
        odd steps:   P = orthogonalise(P)     Q = sum_i M_i^T P       e_i = M_i - P (M_i^T P)^T
        total = P Q^T

    Vectors, and matrices that would not get smaller by `min_gain`, go uncompressed.

    Args:
        rank: Rank r of the approximation; at most what the matrix has.
        target_ratio: If above 0, each matrix has a rank of its own in the place of ``rank``: the largest, but at least
            1, whose factors are this many times smaller than the matrix.
        min_gain: How many times smaller the factors of PowerSGD must be for a matrix to be compressed; 0 compresses
            all. In each step only one of them is sent.
        seed: Of the first factors, the same on all ranks.
    """

    name = "acpsgd"
    paper = "Zhang et al., Evaluation and Optimization of Gradient Compression for Distributed Deep Learning, 2023"
    learns = True
    examples = (
        Example("acpsgd:rank=2", 2 * 40 * 4, gain=20),  # the left factors in the first step
    )
    compared = ("acpsgd:rank=64", "acpsgd:rank=16", "acpsgd:rank=4")
    collective = "allreduce"
    keeps = "P and Q, r x (rows + columns)"

    def init(self, ops: Ops, bucket: Bucket, size: int) -> ACPSGDState:
        return ACPSGDState(0, self.draw(ops, bucket, "left"), self.draw(ops, bucket, "right"))

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: ACPSGDState, world: World, keep: bool = False
    ) -> Exchanging:
        ms = self.matrices(ops, bucket, x)

        def left() -> Exchanging:
            qs = [ops.orthogonalise(q) for q in self.right(ops, bucket, state.q)]
            mine = [ops.project(m, q) for m, q in zip(ms, qs, strict=True)]
            p = yield AllReduce(flat(ops, mine))
            total = Products(self.left(ops, bucket, p), qs)
            rest = ops.subtract_products(x, mine, qs) if keep else None
            return Exchange(total, ACPSGDState(state.step + 1, p / world.size, flat(ops, qs)), rest)

        def right() -> Exchanging:
            ps = [ops.orthogonalise(p) for p in self.left(ops, bucket, state.p)]
            mine = [ops.project_back(m, p) for m, p in zip(ms, ps, strict=True)]
            q = yield AllReduce(flat(ops, mine))
            total = Products(ps, self.right(ops, bucket, q))
            rest = ops.subtract_products(x, ps, mine) if keep else None
            return Exchange(total, ACPSGDState(state.step + 1, flat(ops, ps), q / world.size), rest)

        taken: Exchange = yield Branch(ops.stage(state.step % 2, [1]), (left, right))
        return taken
