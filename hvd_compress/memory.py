"""What is kept between steps so that nothing is lost: wrappers around any method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hvd_compress.bucket import Bucket, Shape
from hvd_compress.collectives import Array, Exchange, Exchanging, State, World
from hvd_compress.errors import SpecError
from hvd_compress.methods.base import Method
from hvd_compress.ops import Ops


class ErrorFeedbackState(NamedTuple):
    """What error feedback keeps.

    Attributes:
        residual: What this rank has not sent yet, in the units of its gradient; shape ``(bucket.numel,)``.
        inner: The state of the method inside.
    """

    residual: Array
    inner: State


@dataclass(frozen=True)
class ErrorFeedback(Method):
    """Add what was not sent to the next gradient.

    Karimireddy et al., Error Feedback Fixes SignSGD and Other Gradient Compression Schemes, 2019, Algorithm 2::

        p_i = g_i + e_i         send C(p_i)         e_i = p_i - C(p_i)

    So over any number of steps, the sum of what was sent plus the residual is the sum of the gradients.

    Args:
        inner: The method that compresses.
    """

    inner: Method

    def __post_init__(self) -> None:
        if not self.inner.can_retain:
            raise SpecError(f"feedback=on is not possible with {self.inner!r}: it leaves nothing to keep; turn it off")

    def compresses(self, shape: Shape) -> bool:
        return self.inner.compresses(shape)

    def init(self, ops: Ops, bucket: Bucket) -> ErrorFeedbackState:
        return ErrorFeedbackState(ops.zeros((bucket.numel,), bucket.dtype), self.inner.init(ops, bucket))

    def exchange(self, ops: Ops, bucket: Bucket, x: Array, state: ErrorFeedbackState, world: World) -> Exchanging:
        corrected = x + state.residual
        total, sent, inner = yield from self.inner.exchange(ops, bucket, corrected, state.inner, world)
        residual = self.inner.retain(ops, corrected, sent)
        return Exchange(total, None, ErrorFeedbackState(residual, inner))
