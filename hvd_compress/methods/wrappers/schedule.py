"""Schedules: wrappers that change the compression during training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import Exchange, Exchanging, State, World
from hvd_compress.core.method import MOST_STEPS, Method, Wrapper, check_range, check_whole, compensate
from hvd_compress.core.state_tree import PerWorld
from hvd_compress.errors import SpecError
from hvd_compress.methods.cast import Dense
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.totals import dense

WARMUP_STAGES = 4


class Stage(NamedTuple):
    """Stage of a schedule.

    Attributes:
        until: First step after the stage, counted from 0.
        method: `Dense`, or the method of the `Schedule` with other hyper-parameters.
    """

    until: int
    method: Method


class ScheduleState(NamedTuple):
    """State of a schedule.

    Attributes:
        step: Number of exchanges so far.
        inner: State of the wrapped method, which all stages share.
    """

    step: int
    inner: State


@dataclass(frozen=True)
class Schedule(Wrapper):
    """Start dense or with milder compression, and insert dense steps at intervals.

    A dense step also flushes the residual.

    Args:
        inner: Method of all steps after the stages.
        stages: Stages in order of time; all share the state of ``inner``.
        every: Make each ``every``-th step dense; 0 for none.
    """

    stages: tuple[Stage, ...] = ()
    every: int = 0

    def __post_init__(self) -> None:
        ends = [stage.until for stage in self.stages]
        if sorted(set(ends)) != ends or (ends and ends[0] < 1) or not (ends or self.every):
            raise SpecError(f"stages end at steps {ends}: give stages that end at increasing steps from 1, or every")
        if self.every:
            check_whole("every", self.every, 2, MOST_STEPS)

    def init(self, ops: Ops, bucket: Bucket, world: World) -> ScheduleState:
        return ScheduleState(0, self.inner.init(ops, bucket, world))

    def residual(self, state: ScheduleState) -> Array | None:
        return self.inner.residual(state.inner)

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: ScheduleState, world: World, return_error: bool = False
    ) -> Exchanging:
        method = next((stage.method for stage in self.stages if state.step < stage.until), self.inner)
        if self.every and state.step % self.every == self.every - 1:
            method = Dense()
        start = self.inner.dense if isinstance(method, Dense) else method.exchange
        exchange = yield from start(ops, bucket, x, state.inner, world)
        return Exchange(exchange.total, ScheduleState(state.step + 1, exchange.state))

    def dense(self, ops: Ops, bucket: Bucket, x: Array, state: ScheduleState, world: World) -> Exchanging:
        exchange = yield from self.inner.dense(ops, bucket, x, state.inner, world)
        return Exchange(exchange.total, ScheduleState(state.step + 1, exchange.state))


def schedule(method: Method, start: int = 0, warmup: int = 0, every: int = 0) -> Method:
    """Wrap a method in dense first steps, a warm-up of its ratio, and dense steps at intervals.

    The warm-up follows Lin et al., Deep Gradient Compression, 2018: four stages of equal length with exponentially
    decreasing ratios ``ratio^(1/5) .. ratio^(4/5)`` (0.25, 0.063, 0.016, 0.004 for a ratio of 0.001).

    Args:
        method: The method after the warm-up.
        start: Number of dense first steps.
        warmup: Number of warm-up steps after these; a multiple of 4, for methods with a ratio.
        every: Make each ``every``-th step dense; 0 for none.

    Raises:
        SpecError: If a number is out of range or the method has no ratio.
    """
    check_whole("start", start, 0, MOST_STEPS)
    check_whole("warmup", warmup, 0, MOST_STEPS)
    check_range("warmup", warmup, "a multiple of 4", warmup % WARMUP_STAGES == 0)
    stages = [Stage(start, Dense())] if start else []
    stages += [Stage(start + (i + 1) * warmup // WARMUP_STAGES, m) for i, m in enumerate(_ramp(method, warmup))]
    return Schedule(method, tuple(stages), every) if stages or every else method


def _ramp(method: Method, warmup: int) -> Iterator[Method]:
    """Yield the method of each stage of the warm-up."""
    if not warmup:
        return
    for stage in range(1, WARMUP_STAGES + 1):
        yield _milder(method, stage / (WARMUP_STAGES + 1))


def _milder(method: Any, power: float) -> Method:
    """Return a method with a power of its ratio."""
    if isinstance(method, Wrapper):
        return replace(method, inner=_milder(method.inner, power))
    if not getattr(method, "ratio", 0):
        raise SpecError(f"warmup is not supported with {method}, which has no ratio: take start= instead")
    milder: Method = replace(method, ratio=method.ratio**power)
    return milder


class DelayedState(NamedTuple):
    """State of `Delayed`.

    Attributes:
        step: Number of exchanges so far.
        arriving: Sum of the previous step, to be applied now; shape ``(bucket.numel,)``.
        ahead: This rank's gradient of the previous step, applied locally so far; shape ``(bucket.numel,)``.
        inner: State of the wrapped method.
    """

    step: int
    arriving: PerWorld
    ahead: PerWorld
    inner: State


@dataclass(frozen=True)
class Delayed(Wrapper):
    """Apply the local gradient at once, and the sum one step later.

    Xu et al., CD-SGD: Distributed Stochastic Gradient Descent with Compression and Delay Compensation, 2021. With C the
    wrapped method and n ranks, the optimizer of rank i gets in step t ::

        g_i[t] - g_i[t-1] + mean_j C(g_j)[t-1]           and in every k-th step, for correction,
                - g_i[t-1] + mean_j C(g_j)[t-1] + mean_j g_j[t]

    As in the paper, the weights are those of delayed training plus one local step. The optimizer must be SGD without
    momentum, with a constant learning rate between corrections. The local steps make weights differ between ranks
    until the next correction, so save checkpoints and evaluate after corrections. Rounding errors accumulate, so
    broadcast the parameters from time to time. Each step still waits for its exchange: this shows the effect of delay
    on convergence, but does not hide communication.

    Args:
        inner: The wrapped method.
        every: k: each k-th step is a correction in full precision.
    """

    every: int = 10

    @property
    def needs_plain_sgd(self) -> bool:
        return True

    def __post_init__(self) -> None:
        check_whole("delay", self.every, 2, MOST_STEPS)

    def init(self, ops: Ops, bucket: Bucket, world: World) -> DelayedState:
        zeros = ops.zeros((bucket.numel,), bucket.dtype)
        return DelayedState(0, zeros, zeros, self.inner.init(ops, bucket, world))

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: DelayedState, world: World, return_error: bool = False
    ) -> Exchanging:
        behind = state.arriving - state.ahead * world.size

        if state.step % self.every == self.every - 1:
            given = compensate(ops, self.inner, x, state.inner)
            exchange = yield from self.inner.dense(ops, bucket, given, state.inner, world)
            zeros = ops.zeros((bucket.numel,), bucket.dtype)
            return Exchange(behind + exchange.total, DelayedState(state.step + 1, zeros, zeros, exchange.state))
        mine = x * 1  # the wrapped method may overwrite its input
        given = compensate(ops, self.inner, x, state.inner)
        exchange = yield from self.inner.exchange(ops, bucket, given, state.inner, world)
        arriving = dense(ops, exchange.total)
        return Exchange(behind + mine * world.size, DelayedState(state.step + 1, arriving, mine, exchange.state))
