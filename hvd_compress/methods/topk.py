"""Top-k: each rank sends its largest coordinates."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import State
from hvd_compress.core.method import Example, check_range, register
from hvd_compress.methods.sparse import Sparse
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.code import count


@register
@dataclass(frozen=True, kw_only=True)
class TopK(Sparse):
    """Exact top-k by magnitude; ties go to the lower index. See `Sparse` for the exchange.

    Args:
        ratio: Share of the coordinates that are sent, in (0, 1].
        values: ``"fp32"``, or ``"fp16"`` to send values in 16 bits.
    """

    name = "topk"
    card = Sparse.card._replace(
        paper="Aji, Heafield, Sparse Communication for Distributed Gradient Descent, 2017",
        examples=(
            Example("topk:ratio=0.1", 100 * (4 + 2)),
            Example("topk:ratio=0.1,values=fp16", 100 * (2 + 2)),
        ),
        lossless=("topk:ratio=1",),
        compared=(
            "topk:ratio=0.25,values=fp16",
            "topk:ratio=0.0625,values=fp16",
            "topk:ratio=0.0156,values=fp16",
        ),
    )
    boundary = True
    ragged = False

    ratio: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("ratio", self.ratio, "in (0, 1]", 0 < self.ratio <= 1)

    @property
    def bound(self) -> float | None:
        return 1 - self.ratio

    def select(self, ops: Ops, bucket: Bucket, x: Array, state: State) -> tuple[Array, State]:
        return ops.top_indices(x, count(self.ratio, bucket.numel)), state
