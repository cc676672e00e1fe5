"""Random-k: all ranks send the same random coordinates, which are summed without indices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllReduce, Exchange, Exchanging, SentIndices, World
from hvd_compress.core.method import Card, Counted, Example, Method, check_range, register
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.code import count
from hvd_compress.ops.totals import SparseSum


@register
@dataclass(frozen=True)
class RandomK(Method):
    """Random-k with a shared seed, exchanged by allreduce.

    The d coordinates are split into k runs whose lengths differ by at most one. One coordinate is drawn from each run,
    with probability 1 / length, about k/d. With S the k drawn coordinates::

        total = sum_i sum_{j in S} p_i[j] e_j            e_i = p_i - p_i restricted to S

    ``unbiased=on`` multiplies each value by the length of its run, so that ``E[total] = sum_i g_i``, with a relative
    variance of about d/k - 1. It requires ``feedback=off``.

    Args:
        ratio: Share of the coordinates that are sent, in (0, 1].
        unbiased: Scale up the values; only with ``feedback=off``.
        seed: Random seed, the same on all ranks.
    """

    name = "randomk"
    family = "sparse"
    card = Card(
        paper="Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, 2018",
        collective="allreduce",
        keeps="step count",
        unbiased="with unbiased=on",
        examples=(
            Example("randomk:ratio=0.1", 400),
            Example("randomk:ratio=0.1,unbiased=on", 400, unbiased=True, gain=20),
        ),
        lossless=("randomk:ratio=1", "randomk:ratio=1,unbiased=on"),
        compared=("randomk:ratio=0.25", "randomk:ratio=0.0625", "randomk:ratio=0.0156"),
    )
    boundary = True
    feedback = True
    lags = True
    retains = True

    ratio: float = 0.01
    unbiased: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("ratio", self.ratio, "in (0, 1]", 0 < self.ratio <= 1)
        check_range("seed", self.seed, "in 0 .. 2**32-1", 0 <= self.seed < 2**32)

    @property
    def supports_feedback(self) -> bool:
        return not self.unbiased  # scaled values overshoot, so a residual would grow from step to step

    @property
    def bound(self) -> float | None:
        return 1 / self.ratio - 1 if self.unbiased else 1 - self.ratio

    def init(self, ops: Ops, bucket: Bucket, world: World) -> Counted:
        return Counted(step=0)

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: Counted, world: World, return_error: bool = False
    ) -> Exchanging:
        k = count(self.ratio, bucket.numel)
        bounds = np.arange(k + 1) * bucket.numel // k
        starts, lengths = ops.constant(bounds[:-1]), ops.constant(np.diff(bounds))
        indices = starts + ops.below(ops.seed(self.seed, bucket.seed, state.step), lengths)

        values = ops.take(x, indices)
        if self.unbiased:
            values = values * ops.cast(lengths, bucket.dtype)
        summed = yield AllReduce(values)

        total = SparseSum([(indices, summed)], bucket.numel, bucket.dtype)
        error = ops.put(x, indices, 0.0) if return_error else None
        return Exchange(total, Counted(state.step + 1), error, SentIndices(indices))
