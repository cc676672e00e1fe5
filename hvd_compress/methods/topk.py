"""Top-k: every rank sends its own largest coordinates."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_compress.bucket import Bucket
from hvd_compress.collectives import AllGather, Array, Exchange, Exchanging, State, World
from hvd_compress.methods.base import Method, check_range, count
from hvd_compress.ops import Ops

HALF_MAX = 65504.0
"""Largest finite float16."""


@dataclass(frozen=True)
class TopK(Method):
    """Exact top-k by magnitude, exchanged by allgather.

    With p_i the gradient of rank i plus its residual and S_i the indices of its k largest magnitudes::

        total = sum_i sum_{j in S_i} p_i[j] e_j          e_i = p_i - p_i restricted to S_i

    Args:
        ratio: Share of the coordinates that are sent, in (0, 1].
        values: ``"fp32"`` sends values in the bucket's own precision, ``"fp16"`` in 16 bits, limited to +-65504; what
            rounding and limit take away stays in the residual. Indices take 16 bits in buckets of up to 65536
            coordinates, else 32.
    """

    name = "topk"
    paper = "Aji, Heafield, Sparse Communication for Distributed Gradient Descent, 2017"
    collective = "allgather"
    feedback = True

    ratio: float = 0.01
    values: str = "fp32"

    def __post_init__(self) -> None:
        check_range("ratio", self.ratio, "in (0, 1]", 0 < self.ratio <= 1)
        check_range("values", self.values, "'fp32' or 'fp16'", self.values in ("fp32", "fp16"))

    def exchange(self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World) -> Exchanging:
        k = count(self.ratio, bucket.numel)
        index_dtype = "uint16" if bucket.numel <= 2**16 else "int32"
        value_dtype = "float16" if self.values == "fp16" else bucket.dtype

        indices = ops.top_indices(x, k)
        values = ops.take(x, indices)
        if value_dtype == "float16":
            values = ops.clip(values, -HALF_MAX, HALF_MAX)
        values = ops.cast(values, value_dtype)
        everyone = yield AllGather(ops.to_bytes(values, ops.cast(indices, index_dtype)))

        total = ops.zeros((bucket.numel,), bucket.dtype)
        for rank in range(world.size):  # one rank after another: within one the indices differ, so the order is fixed
            v, i = ops.from_bytes(everyone[rank], (value_dtype, k), (index_dtype, k))
            total = ops.add_at(total, ops.cast(i, "int64"), ops.cast(v, bucket.dtype))
        return Exchange(total, (indices, values), state)

    def retain(self, ops: Ops, corrected: Array, sent: tuple[Array, Array]) -> Array:
        indices, values = sent
        left = ops.take(corrected, indices) - ops.cast(values, ops.dtype(corrected))
        return ops.put(corrected, indices, left)
