"""Dense methods, the baselines: no compression, and half precision."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllReduce, AllToAll, Exchange, Exchanging, ReduceScatter, State, World
from hvd_compress.core.method import Card, Example, Method, register
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.totals import sum_rows


@register
@dataclass(frozen=True)
class Dense(Method):
    """No compression: ``total = sum_i g_i``."""

    name = "none"
    family = "dense"
    card = Card(
        paper="uncompressed synchronous SGD",
        collective="allreduce",
        unbiased="exact",
        examples=(Example("none", 4000),),
        lossless=("none",),
    )
    boundary = True
    linear = True

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, return_error: bool = False
    ) -> Exchanging:
        total = yield AllReduce(x, donate=True)
        return Exchange(total, state)

    def reduce_scatter(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, return_error: bool = False
    ) -> Exchanging:
        total = yield ReduceScatter(ops.reshape(x, (world.size, -1)))
        return Exchange(total, state)


@register
@dataclass(frozen=True)
class Half(Method):
    """Half precision on the wire: ``total = sum_i fp16(g_i)``, summed in float16 as Horovod's own fp16 does.

    Sums beyond the range of float16 (65504) become inf, as a loss scaler expects. With error feedback, each of n ranks
    sends at most +-32768 / n, so that no sum does, and the rest stays in its residual. Integers are not compressed.
    """

    name = "fp16"
    family = "dense"
    card = Card(
        paper="Micikevicius et al., Mixed Precision Training, 2018",
        collective="allreduce",
        examples=(Example("fp16", 2000, total="rounded"),),
    )
    retains = True
    boundary = True
    linear = True

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, return_error: bool = False
    ) -> Exchanging:
        dtype = ops.dtype(x)
        if not dtype.startswith(("float", "bfloat")):
            total = yield AllReduce(x)
            return Exchange(total, state)
        sent = to_half(ops, x, world.size if return_error else None)
        total = yield AllReduce(sent)
        return Exchange(ops.cast(total, dtype), state, x - ops.cast(sent, dtype) if return_error else None)

    def reduce_scatter(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, return_error: bool = False
    ) -> Exchanging:
        """Sum in the dtype of the gradient, as an alltoall sends the same bytes as a reduce-scatter."""
        sent = to_half(ops, x, world.size if return_error else None)
        received = yield AllToAll(ops.reshape(ops.to_bytes(sent), (world.size, -1)))
        (rows,) = ops.from_bytes(ops.reshape(received, (-1,)), ("float16", bucket.numel))
        total = sum_rows(ops, ops.cast(ops.reshape(rows, (world.size, -1)), bucket.dtype), world.size)
        return Exchange(total, state, x - ops.cast(sent, bucket.dtype) if return_error else None)


def to_half(ops: Ops, x: Array, ranks: int | None) -> Array:
    """Round to float16.

    Args:
        ops: Primitives of the framework.
        x: The values to round.
        ranks: Clip them so that the float16 sum over this many ranks cannot overflow: to half of the range, as each
            addition rounds. None to let values beyond the range become inf.
    """
    clipped = x if ranks is None else ops.clip(x, -(2.0**15) / ranks, 2.0**15 / ranks)  # numpy is slow in float16
    return ops.cast(clipped, "float16")
