"""What is kept between steps so that nothing is lost: wrappers around any method.

Each has a state with the state of the method inside, and a ``dense`` exchange that sends all it has kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllReduce, Array, Exchange, Exchanging, State, World
from hvd_compress.core.state_tree import Own, Residual, Total, Vector
from hvd_compress.core.totals import dense
from hvd_compress.errors import SpecError
from hvd_compress.methods.base import Wrapper, check_range
from hvd_compress.ops import Ops


class ErrorFeedbackState(NamedTuple):
    """What error feedback keeps.

    Attributes:
        residual: What this rank has not sent yet, in the units of its gradient; shape ``(bucket.numel,)``. None where
            it has been lent and comes back with the gradient added to it.
        inner: The state of the method inside.
    """

    residual: Residual
    inner: State


@dataclass(frozen=True)
class ErrorFeedback(Wrapper):
    """Add what was not sent to the next gradient.

    Karimireddy et al., Error Feedback Fixes SignSGD and Other Gradient Compression Schemes, 2019, Algorithm 2::

        p_i = g_i + d e_i       send C(p_i)         e_i = (1 - b) e_i + b (p_i - C(p_i))

    with d = b = 1: over any number of steps, the sum of what was sent plus the residual is the sum of the gradients.

    Args:
        inner: The method that compresses.
        decay: d, in (0, 1]: below 1, what waits fades away, so that nothing very old is sent.
        lowpass: b, in (0, 1]: below 1, the residual follows slowly (Chen et al., ScaleCom, 2020, equation 5).
    """

    decay: float = 1.0
    lowpass: float = 1.0

    def __post_init__(self) -> None:
        _check_retains(self, "on")
        check_range("decay", self.decay, "in (0, 1]", 0 < self.decay <= 1)
        check_range("lowpass", self.lowpass, "in (0, 1]", 0 < self.lowpass <= 1)

    def init(self, ops: Ops, bucket: Bucket, size: int) -> ErrorFeedbackState:
        return ErrorFeedbackState(ops.zeros((bucket.numel,), bucket.dtype), self.inner.init(ops, bucket, size))

    def lend(self, state: ErrorFeedbackState) -> tuple[Array, ErrorFeedbackState] | None:
        return (state.residual, state._replace(residual=None)) if self.decay == self.lowpass == 1 else None

    def _late(self, state: ErrorFeedbackState) -> Array | None:
        return state.residual if self.decay == 1 else state.residual * self.decay

    def exchange(self, ops: Ops, bucket: Bucket, x: Array, state: ErrorFeedbackState, world: World) -> Exchanging:
        total, _, inner, residual = yield from self.inner.exchange_late(
            ops, bucket, x, self._late(state), state.inner, world
        )
        if self.lowpass != 1:
            residual = state.residual * (1 - self.lowpass) + residual * self.lowpass
        return Exchange(total, None, ErrorFeedbackState(residual, inner))

    def dense(self, ops: Ops, bucket: Bucket, x: Array, state: ErrorFeedbackState, world: World) -> Exchanging:
        late = self._late(state)
        total = yield AllReduce(x if late is None else ops.add(x, late), donate=True)
        return Exchange(total, None, state._replace(residual=ops.zeros((bucket.numel,), bucket.dtype)))


class EF21State(NamedTuple):
    """What EF21 keeps.

    Attributes:
        local: What the others know of this rank's gradient; shape ``(bucket.numel,)``.
        shared: The sum of that over all ranks.
        inner: The state of the method inside.
    """

    local: Own
    shared: Total
    inner: State


@dataclass(frozen=True)
class EF21(Wrapper):
    """Send how the gradient differs from what the others know of it.

    Richtarik, Sokolov, Fatkhullin, EF21: A New, Simpler, Theoretically Better, and Practically Faster Error Feedback,
    2021, Algorithm 2. With h_i what is known of rank i::

        send C(g_i - h_i)           h_i = h_i + C(g_i - h_i)            total = sum_i h_i

    It wants gradients that change little from step to step: large batches.

    Args:
        inner: The method that compresses.
    """

    def __post_init__(self) -> None:
        _check_retains(self, "ef21")

    def init(self, ops: Ops, bucket: Bucket, size: int) -> EF21State:
        zeros = ops.zeros((bucket.numel,), bucket.dtype)
        return EF21State(zeros, zeros, self.inner.init(ops, bucket, size))

    def exchange(self, ops: Ops, bucket: Bucket, x: Array, state: EF21State, world: World) -> Exchanging:
        change = x - state.local
        total, _, inner, left = yield from self.inner.exchange_late(ops, bucket, change, None, state.inner, world)
        local = x - left
        shared = state.shared + dense(ops, total)
        return Exchange(_own(shared), None, EF21State(local, shared, inner))

    def dense(self, ops: Ops, bucket: Bucket, x: Array, state: EF21State, world: World) -> Exchanging:
        total = yield AllReduce(x)
        return Exchange(_own(total), None, state._replace(local=x, shared=total))


class MomentumCorrectionState(NamedTuple):
    """What momentum correction keeps.

    Attributes:
        velocity: u, the momentum of this rank; shape ``(bucket.numel,)``.
        residual: v, what of it was not sent yet.
        inner: The state of the method inside.
    """

    velocity: Own
    residual: Residual
    inner: State


@dataclass(frozen=True)
class MomentumCorrection(Wrapper):
    """Momentum before compression, and error feedback of velocities in the place of gradients.

    Lin et al., Deep Gradient Compression, 2018, section 3.2, equations 5 and 6, and Algorithm 4. With C restricted to
    the coordinates S_i that a rank sends::

        g_i = clip(g_i, c / sqrt(n))                          (local gradient clipping; c = 0: none)
        u_i = m u_i + g_i             v_i = v_i + u_i         (Nesterov: u_i = m (u_i + g_i), v_i = v_i + u_i + g_i)
        send C(v_i)                   v_i = v_i - C(v_i)      u_i = 0 on S_i       (momentum factor masking)

    The optimizer must not add momentum of its own.

    Args:
        inner: The method that compresses.
        momentum: m, in (0, 1).
        nesterov: Use Nesterov's momentum.
        clip_norm: c: the largest L2 norm that the sum of the gradients of a bucket is thought to have; 0 for no limit.
    """

    momentum: float = 0.9
    nesterov: bool = False
    clip_norm: float = 0.0

    def __post_init__(self) -> None:
        _check_retains(self, "on")
        check_range("momentum", self.momentum, "in (0, 1)", 0 < self.momentum < 1)
        check_range("clip_norm", self.clip_norm, "at least 0", self.clip_norm >= 0)

    @property
    def needs_plain_sgd(self) -> bool:
        return True

    def init(self, ops: Ops, bucket: Bucket, size: int) -> MomentumCorrectionState:
        zeros = ops.zeros((bucket.numel,), bucket.dtype)
        return MomentumCorrectionState(zeros, zeros, self.inner.init(ops, bucket, size))

    def _accumulate(self, ops: Ops, x: Array, state: MomentumCorrectionState, world: World) -> tuple[Array, Array]:
        """Velocity u and accumulation v with the new gradient in them."""
        if self.clip_norm:
            norm = ops.sqrt(ops.sum_squares(x))
            limit = self.clip_norm / world.size**0.5
            x = x * ops.cast(ops.where(norm > limit, limit / ops.where(norm > 0, norm, 1.0), 1.0), ops.dtype(x))
        return ops.accelerate(x, state.velocity, state.residual, self.momentum, self.nesterov)

    def exchange(self, ops: Ops, bucket: Bucket, x: Array, state: MomentumCorrectionState, world: World) -> Exchanging:
        velocity, corrected = self._accumulate(ops, x, state, world)
        total, sent, inner, left = yield from self.inner.exchange_late(ops, bucket, corrected, None, state.inner, world)
        return Exchange(total, None, MomentumCorrectionState(self.inner.forget(ops, velocity, sent), left, inner))

    def dense(self, ops: Ops, bucket: Bucket, x: Array, state: MomentumCorrectionState, world: World) -> Exchanging:
        velocity, corrected = self._accumulate(ops, x, state, world)
        total = yield AllReduce(corrected, donate=True)
        zeros = ops.zeros((bucket.numel,), bucket.dtype)
        return Exchange(total, None, state._replace(velocity=velocity, residual=zeros))


class MomentumState(NamedTuple):
    """What momentum keeps.

    Attributes:
        velocity: The momentum of the sum; shape ``(bucket.numel,)``; equal on all ranks.
        inner: The state of the method inside.
    """

    velocity: Vector
    inner: State


@dataclass(frozen=True)
class Momentum(Wrapper):
    """Momentum of the sum, as an optimizer has it: ``u = m u + sum_i g_i`` (Nesterov: ``m u + sum_i g_i`` once more).

    For what is not compressed where `MomentumCorrection` is at work, and for methods without error feedback.

    Args:
        inner: The method that compresses.
        momentum: m, in (0, 1).
        nesterov: Use Nesterov's momentum.
    """

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_range("momentum", self.momentum, "in (0, 1)", 0 < self.momentum < 1)

    @property
    def needs_plain_sgd(self) -> bool:
        return True

    def init(self, ops: Ops, bucket: Bucket, size: int) -> MomentumState:
        return MomentumState(ops.zeros((bucket.numel,), bucket.dtype), self.inner.init(ops, bucket, size))

    def exchange(self, ops: Ops, bucket: Bucket, x: Array, state: MomentumState, world: World) -> Exchanging:
        return self._apply(ops, state, (yield from self.inner.exchange(ops, bucket, x, state.inner, world)))

    def dense(self, ops: Ops, bucket: Bucket, x: Array, state: MomentumState, world: World) -> Exchanging:
        return self._apply(ops, state, (yield from self.inner.dense(ops, bucket, x, state.inner, world)))

    def _apply(self, ops: Ops, state: MomentumState, exchange: Exchange) -> Exchange:
        summed = dense(ops, exchange.total)
        velocity = state.velocity * self.momentum + summed
        total = velocity * self.momentum + summed if self.nesterov else _own(velocity)
        return Exchange(total, None, MomentumState(velocity, exchange.state))


def _check_retains(memory: Wrapper, feedback: str) -> None:
    if not memory.inner.can_retain:
        raise SpecError(
            f"feedback={feedback} is not possible with {memory.inner!r}: what it does not send cannot be kept, or would"
            " grow; take feedback=off"
        )


def _own(total: Array) -> Array:
    """A copy: the caller may overwrite a total, but not a state."""
    return total * 1
