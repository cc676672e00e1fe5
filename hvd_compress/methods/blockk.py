"""Block-k: all ranks send the same random block of coordinates, which is summed without indices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllReduce, Exchange, Exchanging, SentIndices, World
from hvd_compress.core.method import Card, Counted, Example, Method, check_range, clear, register, rows_of
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.code import count


@register
@dataclass(frozen=True)
class BlockK(Method):
    """Random block with a shared seed, exchanged by allreduce: the cheapest sparse method.

    The d coordinates are split into d/k blocks of k neighbours, and one block is drawn. With S its coordinates::

        total = sum_i sum_{j in S} p_i[j] e_j            e_i = p_i - p_i restricted to S

    Args:
        ratio: Share of the coordinates that are sent, in (0, 1].
        seed: Random seed, the same on all ranks.
    """

    name = "blockk"
    family = "sparse"
    card = Card(
        paper="Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression, 2019 (Random Block)",
        collective="allreduce",
        keeps="step count",
        examples=(Example("blockk:ratio=0.1", 400),),
        lossless=("blockk:ratio=1",),
        compared=("blockk:ratio=0.0625", "blockk:ratio=0.0156"),
    )
    boundary = True
    feedback = True
    lags = True
    retains = True

    ratio: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("ratio", self.ratio, "in (0, 1]", 0 < self.ratio <= 1)
        check_range("seed", self.seed, "in 0 .. 2**32-1", 0 <= self.seed < 2**32)

    @property
    def bound(self) -> float | None:
        return 1 - self.ratio

    def init(self, ops: Ops, bucket: Bucket, world: World) -> Counted:
        return Counted(step=0)

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: Counted, world: World, return_error: bool = False
    ) -> Exchanging:
        k = count(self.ratio, bucket.numel)
        blocks = rows_of(ops, x, k)
        number = ops.constant(np.array([blocks.shape[0]]))
        chosen = ops.below(ops.seed(self.seed, bucket.seed, state.step), number)
        summed = yield AllReduce(ops.take(blocks, chosen))
        total = ops.put(ops.zeros(tuple(blocks.shape), bucket.dtype), chosen, summed)
        error = clear(ops, x, SentIndices(chosen, k)) if return_error else None
        total = ops.reshape(total, (-1,))[: bucket.numel]
        return Exchange(total, Counted(state.step + 1), error, SentIndices(chosen, k))
