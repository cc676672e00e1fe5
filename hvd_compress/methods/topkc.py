"""TopKC: all ranks send the chunks with the largest norms, which are summed without indices."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllReduce, Exchange, Exchanging, SentIndices, State, World
from hvd_compress.core.method import LARGEST_BLOCK, Card, Example, Method, check_range, check_whole, register, rows_of
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.code import count


@register
@dataclass(frozen=True)
class TopKC(Method):
    """Chunked top-k: one allreduce of chunk norms selects the chunks, a second one sums them.

    With p_i the gradient of rank i plus its residual, split into chunks of C coordinates::

        m = max_i max_c ||p_i[c]||_2                     (allreduce MAX, one number)
        s[c] = sum_i ||p_i[c]||_2 / m                    (allreduce SUM, 16 bits per chunk)
        S = the J chunks with the largest s              (ties go to the lower one)
        total = sum_i sum_{c in S} p_i[c]                (allreduce SUM, 16 bits per coordinate)

    It costs ``16/C + 16 ratio`` bits per coordinate. Large coordinates cluster, so chunks work well; shuffling the
    coordinates would destroy that. m keeps the 16-bit sums in range at any scale of the gradients.

    Args:
        ratio: Share of the chunks that are sent, in (0, 1].
        chunk: C, coordinates per chunk.
        values: ``"fp16"`` sends values in 16 bits, ``"fp32"`` in the bucket's dtype. The residual keeps the rounding
            error.
    """

    name = "topkc"
    family = "sparse"
    card = Card(
        paper=(
            "Han et al., Beyond Throughput and Compression Ratios: Towards High End-to-end Utility of Gradient "
            "Compression, 2024; "
            "Sun et al., Optimizing Network Performance for Distributed DNN Training on GPU Clusters, 2019"
        ),
        collective="3 allreduces (max, norms, values)",
        examples=(Example("topkc:ratio=0.1,chunk=8", 4 + 125 * 2 + 12 * 8 * 2, total="rounded"),),
        lossless=("topkc:ratio=1,values=fp32",),
        compared=("topkc:ratio=0.5", "topkc:ratio=0.125", "topkc:ratio=0.0156"),
    )
    boundary = True
    feedback = True
    lags = True
    retains = True

    ratio: float = 0.01
    chunk: int = 64
    values: str = "fp16"

    def __post_init__(self) -> None:
        check_range("ratio", self.ratio, "in (0, 1]", 0 < self.ratio <= 1)
        check_whole("chunk", self.chunk, 1, LARGEST_BLOCK)
        check_range("values", self.values, "'fp32' or 'fp16'", self.values in ("fp32", "fp16"))

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, return_error: bool = False
    ) -> Exchanging:
        p = rows_of(ops, x, self.chunk)
        rows = int(p.shape[0])
        norms = ops.norms(p)
        largest = yield AllReduce(ops.reshape(ops.absmax(norms), (1,)), op="max")
        unit = ops.where(largest > 0, largest, 1.0)

        summed = yield AllReduce(ops.cast(norms / unit, "float16"))
        chosen = ops.top_indices(ops.cast(summed, "float32"), count(self.ratio, rows))

        dtype = "float16" if self.values == "fp16" else bucket.dtype
        sent = ops.cast(ops.reshape(ops.take(p, chosen), (-1,)) / unit, dtype)
        values = ops.cast((yield AllReduce(sent)), bucket.dtype) * unit
        total = ops.put(ops.zeros((rows, self.chunk), bucket.dtype), chosen, ops.reshape(values, (-1, self.chunk)))
        error = None
        if return_error:
            mine = ops.reshape(ops.cast(sent, bucket.dtype) * unit, (-1, self.chunk))
            error = ops.reshape(ops.put(p, chosen, ops.take(p, chosen) - mine), (-1,))[: bucket.numel]
        return Exchange(ops.reshape(total, (-1,))[: bucket.numel], state, error, SentIndices(chosen, self.chunk))
