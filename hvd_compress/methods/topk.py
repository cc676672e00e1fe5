"""Top-k: every rank sends its own largest coordinates."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import Array, State
from hvd_compress.methods.base import check_range, count
from hvd_compress.methods.sparse import Sparse
from hvd_compress.ops import Ops


@dataclass(frozen=True, kw_only=True)
class TopK(Sparse):
    """Exact top-k by magnitude; of equal magnitudes the lower index wins. See `Sparse` for the exchange.

    Args:
        ratio: Share of the coordinates that are sent, in (0, 1].
        values: ``"fp32"``, or ``"fp16"`` to send values in 16 bits.
    """

    name = "topk"
    paper = "Aji, Heafield, Sparse Communication for Distributed Gradient Descent, 2017"
    ragged = False

    ratio: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("ratio", self.ratio, "in (0, 1]", 0 < self.ratio <= 1)

    def select(self, ops: Ops, bucket: Bucket, x: Array, state: State) -> tuple[Array, State]:
        return ops.top_indices(x, count(self.ratio, bucket.numel)), state
