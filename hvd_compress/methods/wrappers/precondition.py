"""Preconditioning: compress the update of an adaptive optimizer instead of the gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import Exchanging, State, World
from hvd_compress.core.method import Wrapper, check_range, compensate
from hvd_compress.core.state_tree import PrivateFactors
from hvd_compress.methods.wrappers.momentum import clipped
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.moments import sides_of, size_of

Exchanger: TypeAlias = Callable[[Ops, Bucket, Array, State, World], Exchanging]


class PreconditionState(NamedTuple):
    """State of preconditioning.

    Attributes:
        second: Second moments of this rank's gradients; see `hvd_compress.ops.moments`.
        inner: State of the wrapped method.
    """

    second: PrivateFactors
    inner: State


@dataclass(frozen=True)
class Precondition(Wrapper):
    """Divide each rank's gradient by the root of its second moment, as Adam without momentum does, and compress that.

    With g_i the gradient of rank i, as a matrix (the first axis, and all others), and ^ for the correction of the bias
    towards zero of a running mean::

        r_i = b2 r_i + (1 - b2) rowmean(g_i^2)          c_i = b2 c_i + (1 - b2) columnmean(g_i^2)
        v_i = r^_i c^_i / mean(r^_i)                    (vectors: v_i = b2 v_i + (1 - b2) g_i^2, in full)
        x_i = g_i / (sqrt(v^_i) + 1e-8)                 total = sum_i C(x_i)

    The total is an *update*, which plain SGD applies: ``p = p - lr (mean of x_i + weight_decay p)`` is AdamW with
    ``betas=(0.0, b2)``, except for the compression, and for second moments that each rank has for itself, in factors
    (Shazeer, Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018, section 3). The residual of
    error feedback around C is the momentum. If gradients were compressed instead, v would suffer: with one bit per
    coordinate it would be nearly the same for all of them, and with sparse gradients it would lack most of them.

    The optimizer must be SGD, with the learning rate and the weight decay of AdamW. Its momentum takes the place of the
    first beta, and needs as much dampening. Clip by ``clip_norm``: to clip the result would shrink an update whose norm
    is no gradient's.

    Args:
        inner: The wrapped method.
        beta2: b2, in (0, 1).
        clip_norm: Maximum L2 norm of each rank's gradient of a bucket, before all of this; 0 for no clipping.
    """

    beta2: float = 0.95
    clip_norm: float = 0.0

    def __post_init__(self) -> None:
        check_range("beta2", self.beta2, "in (0, 1)", 0 < self.beta2 < 1)
        check_range("clip_norm", self.clip_norm, "at least 0", self.clip_norm >= 0)

    @property
    def needs_plain_sgd(self) -> bool:
        return True

    @property
    def preconditioned(self) -> bool:
        return True

    @property
    def supports_reduce_scatter(self) -> bool:
        return self.inner.supports_reduce_scatter

    def init(self, ops: Ops, bucket: Bucket, world: World) -> PreconditionState:
        size = sum(size_of(sides_of(shape)) for shape in bucket.shapes)
        return PreconditionState(ops.zeros((size,), bucket.dtype), self.inner.init(ops, bucket, world))

    def _update(self, ops: Ops, bucket: Bucket, x: Array, state: PreconditionState) -> tuple[Array, PreconditionState]:
        if self.clip_norm:
            x = clipped(ops, x, self.clip_norm)
        x, second = ops.precondition(x, state.second, [sides_of(shape) for shape in bucket.shapes], self.beta2)
        return x, state._replace(second=second)

    def _sum(
        self, how: Exchanger, ops: Ops, bucket: Bucket, x: Array, state: PreconditionState, world: World
    ) -> Exchanging:
        """Sum updates by a method's ``exchange`` or ``reduce_scatter``."""
        x, state = self._update(ops, bucket, x, state)
        exchange = yield from how(ops, bucket, compensate(ops, self.inner, x, state.inner), state.inner, world)
        return exchange._replace(state=state._replace(inner=exchange.state))

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: PreconditionState, world: World, return_error: bool = False
    ) -> Exchanging:
        return self._sum(self.inner.exchange, ops, bucket, x, state, world)

    def reduce_scatter(
        self, ops: Ops, bucket: Bucket, x: Array, state: PreconditionState, world: World, return_error: bool = False
    ) -> Exchanging:
        return self._sum(self.inner.reduce_scatter, ops, bucket, x, state, world)

    def dense(self, ops: Ops, bucket: Bucket, x: Array, state: PreconditionState, world: World) -> Exchanging:
        x, state = self._update(ops, bucket, x, state)
        return (yield from super().dense(ops, bucket, x, state, world))
