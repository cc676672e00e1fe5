"""Threshold: each rank sends the coordinates above a fixed magnitude."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import State
from hvd_compress.core.method import Example, check_range, register
from hvd_compress.methods.sparse import Sparse
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array


@register
@dataclass(frozen=True, kw_only=True)
class Threshold(Sparse):
    """Send ``S_i = {j : |p_i[j]| >= threshold}``. See `Sparse` for the exchange.

    The size of S_i depends on the scale of the gradients, so the threshold must be tuned to the model; `SIDCo` tunes it
    itself.

    Args:
        threshold: Smallest magnitude that is sent; above 0.
        values: ``"fp32"``, or ``"fp16"`` to send values in 16 bits.
    """

    name = "threshold"
    card = Sparse.card._replace(
        paper="Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, 2015",
        examples=(Example("threshold:threshold=1"),),
        lossless=("threshold:threshold=1e-20",),
        compared=("threshold:threshold=0.005", "threshold:threshold=0.01"),
    )
    boundary = True

    threshold: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("threshold", self.threshold, "above 0", self.threshold > 0)

    def select(self, ops: Ops, bucket: Bucket, x: Array, state: State) -> tuple[Array, State]:
        return ops.above(x, self.threshold), state
