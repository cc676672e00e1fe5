"""ScaleCom: ranks lead in turn, and all send the largest coordinates of the leader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllReduce, Exchange, Exchanging, SentIndices, World
from hvd_compress.core.method import Card, Counted, Example, Method, check_range, register
from hvd_compress.methods.sparse import check_indices
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.code import count
from hvd_compress.ops.totals import SparseSum


@register
@dataclass(frozen=True)
class ScaleCom(Method):
    """Cyclic local top-k (CLT-k): ranks agree on indices first, so an allreduce can sum the values.

    In step t, with n ranks, p_i the gradient of rank i plus its residual, and l = t mod n::

        S = indices of the k largest |p_l|                (sent by the leader alone)
        total = sum_i sum_{j in S} p_i[j] e_j             (allreduce)

    The residual passes a low-pass filter, ``e_i = (1 - b) e_i + b (p_i - p_i restricted to S)``, with b = 0.1 by
    default (option ``lowpass``; 1 is classic error feedback). It keeps residuals similar across ranks, although large
    batches and learning rates make them noisy.

    The leader's indices are summed with zeros of the other ranks.

    Args:
        ratio: Share of the coordinates that are sent, in (0, 1].
    """

    name = "scalecom"
    family = "sparse"
    card = Card(
        paper="Chen et al., ScaleCom: Scalable Sparsified Gradient Compression, 2020",
        collective="2 allreduces (indices, values)",
        keeps="step count",
        claim="65 to 400 times less traffic with 64 learners",
        examples=(Example("scalecom:ratio=0.1", 100 * (4 + 4)),),
        lossless=("scalecom:ratio=1",),
        compared=("scalecom:ratio=0.0313", "scalecom:ratio=0.0078"),
    )
    feedback = True
    lags = True
    retains = True
    memory: ClassVar[Mapping[str, Any]] = {"lowpass": 0.1}

    ratio: float = 0.01

    def __post_init__(self) -> None:
        check_range("ratio", self.ratio, "in (0, 1]", 0 < self.ratio <= 1)

    def init(self, ops: Ops, bucket: Bucket, world: World) -> Counted:
        return Counted(step=0)

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: Counted, world: World, return_error: bool = False
    ) -> Exchanging:
        k = count(self.ratio, bucket.numel)
        leads = state.step % world.size == world.rank
        indices = ops.cast(ops.top_indices(x, k), "int32") if leads else ops.zeros((k,), "int32")
        indices = check_indices(ops, ops.cast((yield AllReduce(indices)), "int64"), bucket, "the leader")
        summed = yield AllReduce(ops.take(x, indices))
        total = SparseSum([(indices, summed)], bucket.numel, bucket.dtype)
        error = ops.put(x, indices, 0.0) if return_error else None
        return Exchange(total, Counted(state.step + 1), error, SentIndices(indices))
