"""Wrapper that measures the error of compressed sums during training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllReduce, Exchange, Exchanging, State, World
from hvd_compress.core.method import Wrapper, compensate
from hvd_compress.core.state_tree import Measurement
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.totals import dense


class MeasuredState(NamedTuple):
    """State of `Measured`.

    Attributes:
        error: Sum over the steps of ``||total - sum_i g_i||^2``, a float64 scalar.
        norm: Sum over the steps of ``||sum_i g_i||^2``, a float64 scalar.
        inner: State of the wrapped method.
    """

    error: Measurement
    norm: Measurement
    inner: State


@dataclass(frozen=True)
class Measured(Wrapper):
    """Compare each compressed sum with the exact one, at the cost of an uncompressed allreduce.

    The normalised error is ``vNMSE = error / norm`` (Han et al., Beyond Throughput and Compression Ratios, 2024). With
    error feedback it counts delayed values as errors twice: when they are missing and when they arrive.

    Args:
        inner: The measured method.
    """

    def init(self, ops: Ops, bucket: Bucket, world: World) -> MeasuredState:
        zero = ops.zeros((), "float64")
        return MeasuredState(zero, zero, self.inner.init(ops, bucket, world))

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: MeasuredState, world: World, return_error: bool = False
    ) -> Exchanging:
        exact = yield AllReduce(x)
        x = compensate(ops, self.inner, x, state.inner)
        exchange = yield from self.inner.exchange(ops, bucket, x, state.inner, world)
        error = state.error + ops.sum_squares(dense(ops, exchange.total) - exact)
        norm = state.norm + ops.sum_squares(exact)
        return Exchange(exchange.total, MeasuredState(error, norm, exchange.state))


def vnmse(states: Iterable[Any]) -> float | None:
    """Return the normalised error over all measured buckets; None if nothing was measured."""
    measured = [found for state in states if (found := _find(state)) is not None]
    norm = sum(float(state.norm) for state in measured)
    return sum(float(state.error) for state in measured) / norm if norm else None


def _find(state: Any) -> MeasuredState | None:
    """Return the `MeasuredState` within nested wrapper states, if any."""
    while state is not None and not isinstance(state, MeasuredState):
        state = getattr(state, "inner", None)
    return state
