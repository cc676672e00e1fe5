"""Error feedback: wrappers that keep a residual between steps.

The ``dense`` exchange of each wrapper also sends its residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllReduce, Exchange, Exchanging, State, World
from hvd_compress.core.method import Wrapper, check_range
from hvd_compress.core.state_tree import Own, Residual, Total
from hvd_compress.errors import SpecError
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.totals import dense


class ErrorFeedbackState(NamedTuple):
    """State of error feedback.

    Attributes:
        residual: ``d e_i``, in the units of the gradient; shape ``(bucket.numel,)``.
        inner: State of the wrapped method.
    """

    residual: Residual
    inner: State


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """Add the compression error to the next gradient.

    Karimireddy et al., Error Feedback Fixes SignSGD and Other Gradient Compression Schemes, 2019, Algorithm 2::

        p_i = g_i + d e_i       send C(p_i)         e_i = (1 - b) e_i + b (p_i - C(p_i))

    With d = b = 1, the sum of everything sent plus the residual equals the sum of all gradients.

    Args:
        inner: The wrapped method.
        decay: d, in (0, 1]; below 1, old residuals fade away.
        lowpass: b, in (0, 1]; below 1, the residual changes slowly (Chen et al., ScaleCom, 2020, equation 5).
    """

    decay: float = 1.0
    lowpass: float = 1.0

    def __post_init__(self) -> None:
        check_retains(self, "on")
        check_range("decay", self.decay, "in (0, 1]", 0 < self.decay <= 1)
        check_range("lowpass", self.lowpass, "in (0, 1]", 0 < self.lowpass <= 1)

    @property
    def adds_momentum(self) -> bool:
        method = self.inner
        while isinstance(method, Wrapper):
            method = method.inner
        return method.lags

    def init(self, ops: Ops, bucket: Bucket, world: World) -> ErrorFeedbackState:
        return ErrorFeedbackState(ops.zeros((bucket.numel,), bucket.dtype), self.inner.init(ops, bucket, world))

    def residual(self, state: ErrorFeedbackState) -> Array:
        return state.residual

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: ErrorFeedbackState, world: World, return_error: bool = False
    ) -> Exchanging:
        exchange = yield from self.inner.exchange(ops, bucket, x, state.inner, world, return_error=True)
        return self._keep_residual(ops, state, exchange)

    @property
    def supports_reduce_scatter(self) -> bool:
        return self.inner.supports_reduce_scatter

    def reduce_scatter(
        self, ops: Ops, bucket: Bucket, x: Array, state: ErrorFeedbackState, world: World, return_error: bool = False
    ) -> Exchanging:
        exchange = yield from self.inner.reduce_scatter(ops, bucket, x, state.inner, world, return_error=True)
        return self._keep_residual(ops, state, exchange)

    def _keep_residual(self, ops: Ops, state: ErrorFeedbackState, exchange: Exchange) -> Exchange:
        residual = exchange.error if self.decay == 1 else ops.scale(exchange.error, self.decay)
        if self.lowpass != 1:
            residual = ops.blend(state.residual, residual, 1 - self.lowpass)
        return Exchange(exchange.total, ErrorFeedbackState(residual, exchange.state))

    def dense(self, ops: Ops, bucket: Bucket, x: Array, state: ErrorFeedbackState, world: World) -> Exchanging:
        exchange = yield from self.inner.dense(ops, bucket, x, state.inner, world)
        return Exchange(exchange.total, ErrorFeedbackState(ops.zeros((bucket.numel,), bucket.dtype), exchange.state))


class EF21State(NamedTuple):
    """State of EF21.

    Attributes:
        local: Estimate h_i of this rank's gradient that all ranks know; shape ``(bucket.numel,)``.
        shared: Sum of the estimates of all ranks.
        inner: State of the wrapped method.
    """

    local: Own
    shared: Total
    inner: State


@dataclass(frozen=True)
class EF21(Wrapper):
    """Compress the difference between the gradient and its last estimate.

    Richtarik, Sokolov, Fatkhullin, EF21: A New, Simpler, Theoretically Better, and Practically Faster Error Feedback,
    2021, Algorithm 2. With h_i the estimate of rank i's gradient::

        send C(g_i - h_i)           h_i = h_i + C(g_i - h_i)            total = sum_i h_i

    It works best if gradients change little between steps, as with large batches.

    Args:
        inner: The wrapped method.
    """

    def __post_init__(self) -> None:
        check_retains(self, "ef21")
        if not self.inner.sums:
            raise SpecError(f"feedback=ef21 is not supported with {self.inner}: its total is no sum; take feedback=on")

    def init(self, ops: Ops, bucket: Bucket, world: World) -> EF21State:
        zeros = ops.zeros((bucket.numel,), bucket.dtype)
        return EF21State(zeros, zeros, self.inner.init(ops, bucket, world))

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: EF21State, world: World, return_error: bool = False
    ) -> Exchanging:
        change = x - state.local
        exchange = yield from self.inner.exchange(ops, bucket, change, state.inner, world, return_error=True)
        local = x - exchange.error
        shared = state.shared + dense(ops, exchange.total)
        return Exchange(own(shared), EF21State(local, shared, exchange.state))

    def dense(self, ops: Ops, bucket: Bucket, x: Array, state: EF21State, world: World) -> Exchanging:
        total = yield AllReduce(x)
        # The sum is exact now, so what the inner method keeps back is obsolete.
        _, inner = self.inner.flush(ops, bucket, ops.zeros((bucket.numel,), bucket.dtype), state.inner, world)
        return Exchange(own(total), EF21State(x, total, inner))


def check_retains(memory: Wrapper, feedback: str) -> None:
    """Reject error feedback around a method that does not support it.

    Raises:
        SpecError: If the method does not support it.
    """
    if not memory.inner.supports_feedback:
        raise SpecError(
            f"feedback={feedback} is not supported with {memory.inner}: its compression error is unknown or would"
            " grow without bound; take feedback=off"
        )


def own(total: Array) -> Array:
    """Return a copy of a total, as callers may overwrite totals but not states."""
    return total * 1
