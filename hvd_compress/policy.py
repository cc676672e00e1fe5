"""When and where to compress: wrappers around any method."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from hvd_compress.bucket import Bucket, Shape
from hvd_compress.collectives import Array, Branch, Exchange, Exchanging, State, World
from hvd_compress.errors import SpecError
from hvd_compress.memory import ErrorFeedback
from hvd_compress.methods.base import Method, check_range
from hvd_compress.methods.cast import Dense
from hvd_compress.ops import Ops

WARMUP_STAGES = 4


@dataclass(frozen=True)
class Selective(Method):
    """Where: leave gradients uncompressed that are not worth it.

    Biases and the scales of normalisation layers are vectors: little to save, much to lose.

    Args:
        inner: For the tensors that are compressed.
        dense: For the others.
        min_size: Gradients with fewer elements are not compressed.
        vectors: Compress vectors too.
    """

    inner: Method
    dense: Method = field(default_factory=Dense)
    min_size: int = 1024
    vectors: bool = False

    def __post_init__(self) -> None:
        check_range("min_size", self.min_size, "at least 0", self.min_size >= 0)

    @property
    def core(self) -> Method:
        return self.inner.core

    def compresses(self, shape: Shape) -> bool:
        size = Bucket("", (shape,), "").numel
        return (len(shape) > 1 or self.vectors) and size >= self.min_size and self.inner.compresses(shape)

    def route(self, name: str, shape: Shape) -> Method:
        return self.inner.route(name, shape) if self.compresses(shape) else self.dense

    def init(self, ops: Ops, bucket: Bucket) -> State:
        return self.inner.init(ops, bucket)

    def exchange(self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World) -> Exchanging:
        return self.inner.exchange(ops, bucket, x, state, world)


class Stage(NamedTuple):
    """A part of training.

    Attributes:
        until: The first step (counted from 0) that no longer belongs to it.
        method: `Dense`, or the method of the `Schedule` with other hyper-parameters.
    """

    until: int
    method: Method


class ScheduleState(NamedTuple):
    """What a schedule keeps.

    Attributes:
        step: How many exchanges there were.
        inner: The state of the method that is in force now or later.
    """

    step: int | Array
    inner: State


@dataclass(frozen=True)
class Schedule(Method):
    """When: other methods for the first steps. Dense stages leave the state of the method alone.

    Args:
        inner: For all steps after the stages.
        stages: In order of time. All but dense ones share the state of `inner`.
    """

    inner: Method
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        ends = [stage.until for stage in self.stages]
        if not ends or sorted(set(ends)) != ends or ends[0] < 1:
            raise SpecError(f"stages end at the steps {ends}; they must be whole numbers that grow, from 1")

    def compresses(self, shape: Shape) -> bool:
        return self.inner.compresses(shape)

    def init(self, ops: Ops, bucket: Bucket) -> ScheduleState:
        return ScheduleState(0, self.inner.init(ops, bucket))

    def exchange(self, ops: Ops, bucket: Bucket, x: Array, state: ScheduleState, world: World) -> Exchanging:
        def run(method: Method) -> Exchanging:
            if isinstance(method, Dense):
                dense = yield from method.exchange(ops, bucket, x, (), world)
                return Exchange(dense.total, None, state.inner)
            return (yield from method.exchange(ops, bucket, x, state.inner, world))

        index = ops.stage(state.step, [stage.until for stage in self.stages])
        methods = [*(stage.method for stage in self.stages), self.inner]
        taken = yield Branch(index, tuple(partial(run, method) for method in methods))
        return Exchange(taken.total, None, ScheduleState(state.step + 1, taken.state))


def schedule(method: Method, start: int = 0, warmup: int = 0) -> Method:
    """Begin dense, then approach the ratio in stages, then stay with the method.

    The warm-up is that of Lin et al., Deep Gradient Compression, 2018: four stages of equal length whose ratios fall
    exponentially, ``ratio^(1/5) .. ratio^(4/5)`` (0.25, 0.063, 0.016, 0.004 for a ratio of 0.001).

    Args:
        method: What to come to.
        start: Dense steps before anything else.
        warmup: Steps of warm-up after these; a multiple of 4, for methods with a ratio.

    Raises:
        SpecError: If a number is out of range or the method has no ratio.
    """
    check_range("start", start, "at least 0", start >= 0)
    check_range("warmup", warmup, "a multiple of 4, at least 0", warmup >= 0 and warmup % WARMUP_STAGES == 0)
    stages = [Stage(start, Dense())] if start else []
    stages += [Stage(start + (i + 1) * warmup // WARMUP_STAGES, m) for i, m in enumerate(_ramp(method, warmup))]
    return Schedule(method, tuple(stages)) if stages else method


def _ramp(method: Method, warmup: int) -> Iterator[Method]:
    """The method at each stage of the warm-up."""
    if not warmup:
        return
    inner: Any = method.inner if isinstance(method, ErrorFeedback) else method
    if not hasattr(inner, "ratio"):
        raise SpecError(f"warmup={warmup} is not possible: {inner!r} has no ratio to approach; take start={warmup}")
    for stage in range(1, WARMUP_STAGES + 1):
        milder = replace(inner, ratio=inner.ratio ** (stage / (WARMUP_STAGES + 1)))
        yield ErrorFeedback(milder) if isinstance(method, ErrorFeedback) else milder
