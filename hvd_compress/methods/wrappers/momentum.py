"""Momentum wrappers: before compression, or after the sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import Exchange, Exchanging, State, World
from hvd_compress.core.method import Wrapper, check_range, clear, compensate
from hvd_compress.core.state_tree import Own, Residual, Vector
from hvd_compress.methods.wrappers.error_feedback import check_retains, own
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.totals import dense


def clipped(ops: Ops, x: Array, limit: float) -> Array:
    """Scale a vector down to an L2 norm if that is larger."""
    norm = ops.sqrt(ops.sum_squares(x))
    return x * ops.cast(ops.where(norm > limit, limit / ops.where(norm > 0, norm, 1.0), 1.0), ops.dtype(x))


class MomentumCorrectionState(NamedTuple):
    """State of momentum correction.

    Attributes:
        velocity: u, the momentum of this rank; shape ``(bucket.numel,)``.
        residual: v, the accumulated velocity that was not sent yet; shape ``(bucket.numel,)``.
        inner: State of the wrapped method.
    """

    velocity: Own
    residual: Residual
    inner: State


@dataclass(frozen=True)
class MomentumCorrection(Wrapper):
    """Momentum before compression, with error feedback of velocities instead of gradients.

    Lin et al., Deep Gradient Compression, 2018, section 3.2, equations 5 and 6, and Algorithm 4. With S_i the
    coordinates that rank i sends::

        g_i = clip(g_i, c / sqrt(n))                          (local gradient clipping; c = 0: none)
        u_i = m u_i + g_i             v_i = v_i + u_i         (Nesterov: u_i = m (u_i + g_i), v_i = v_i + u_i + g_i)
        send C(v_i)                   v_i = v_i - C(v_i)      u_i = 0 on S_i       (momentum factor masking)

    Dense steps send all of v_i, and keep u_i as the authors' code does: it is momentum, not a gradient that is missing.

    The optimizer must be without momentum.

    Args:
        inner: The wrapped method.
        momentum: m, in (0, 1).
        nesterov: Use Nesterov momentum.
        clip_norm: Maximum L2 norm c for the summed gradient of a bucket, at least 0; 0 for no clipping.
    """

    momentum: float = 0.9
    nesterov: bool = False
    clip_norm: float = 0.0

    def __post_init__(self) -> None:
        check_retains(self, "on")
        check_range("momentum", self.momentum, "in (0, 1)", 0 < self.momentum < 1)
        check_range("clip_norm", self.clip_norm, "at least 0", self.clip_norm >= 0)

    @property
    def needs_plain_sgd(self) -> bool:
        return True

    def init(self, ops: Ops, bucket: Bucket, world: World) -> MomentumCorrectionState:
        zeros = ops.zeros((bucket.numel,), bucket.dtype)
        return MomentumCorrectionState(zeros, zeros, self.inner.init(ops, bucket, world))

    def _accumulate(self, ops: Ops, x: Array, state: MomentumCorrectionState, world: World) -> tuple[Array, Array]:
        """Return the velocity u and the accumulation v, updated with the new gradient."""
        if self.clip_norm:
            x = clipped(ops, x, self.clip_norm / world.size**0.5)
        return ops.accelerate(x, state.velocity, state.residual, self.momentum, self.nesterov)

    def exchange(
        self,
        ops: Ops,
        bucket: Bucket,
        x: Array,
        state: MomentumCorrectionState,
        world: World,
        return_error: bool = False,
    ) -> Exchanging:
        velocity, corrected = self._accumulate(ops, x, state, world)
        exchange = yield from self.inner.exchange(ops, bucket, corrected, state.inner, world, return_error=True)
        if exchange.sent_indices is not None:
            velocity = clear(ops, velocity, exchange.sent_indices)
        return Exchange(exchange.total, MomentumCorrectionState(velocity, exchange.error, exchange.state))

    def dense(self, ops: Ops, bucket: Bucket, x: Array, state: MomentumCorrectionState, world: World) -> Exchanging:
        velocity, corrected = self._accumulate(ops, x, state, world)
        exchange = yield from self.inner.dense(ops, bucket, corrected, state.inner, world)
        zeros = ops.zeros((bucket.numel,), bucket.dtype)
        return Exchange(exchange.total, MomentumCorrectionState(velocity, zeros, exchange.state))


class MomentumState(NamedTuple):
    """State of momentum.

    Attributes:
        velocity: Momentum of the sum; shape ``(bucket.numel,)``; equal on all ranks.
        inner: State of the wrapped method.
    """

    velocity: Vector
    inner: State


@dataclass(frozen=True)
class Momentum(Wrapper):
    """Momentum of the sum, as in an optimizer: ``u = m u + sum_i g_i`` (Nesterov: ``m u + sum_i g_i`` once more).

    It serves methods without error feedback, and dense gradients beside `MomentumCorrection`.

    Args:
        inner: The wrapped method.
        momentum: m, in (0, 1).
        nesterov: Use Nesterov momentum.
    """

    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_range("momentum", self.momentum, "in (0, 1)", 0 < self.momentum < 1)

    @property
    def needs_plain_sgd(self) -> bool:
        return True

    def init(self, ops: Ops, bucket: Bucket, world: World) -> MomentumState:
        return MomentumState(ops.zeros((bucket.numel,), bucket.dtype), self.inner.init(ops, bucket, world))

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: MomentumState, world: World, return_error: bool = False
    ) -> Exchanging:
        x = compensate(ops, self.inner, x, state.inner)
        return self._apply(ops, state, (yield from self.inner.exchange(ops, bucket, x, state.inner, world)))

    def dense(self, ops: Ops, bucket: Bucket, x: Array, state: MomentumState, world: World) -> Exchanging:
        x = compensate(ops, self.inner, x, state.inner)
        return self._apply(ops, state, (yield from self.inner.dense(ops, bucket, x, state.inner, world)))

    def _apply(self, ops: Ops, state: MomentumState, exchange: Exchange) -> Exchange:
        summed = dense(ops, exchange.total)
        velocity = state.velocity * self.momentum + summed
        total = velocity * self.momentum + summed if self.nesterov else own(velocity)
        return Exchange(total, MomentumState(velocity, exchange.state))
