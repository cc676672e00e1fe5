"""Replace collectives that a transport does not support.

A saturating sum becomes an alltoall and an allgather. Each rank serves one shard of the bucket: it receives that shard
from all ranks, combines it and sends the result to all. The traffic is that of a ring allreduce. A reduce-scatter
becomes an alltoall.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from hvd_compress.core.collectives import (
    AllGather,
    AllToAll,
    Collective,
    Exchanging,
    ReduceScatter,
    SaturatingSum,
    World,
    rewrite,
)
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.totals import sum_rows

LACKS: frozenset[type] = frozenset({SaturatingSum})
"""Collectives that Horovod does not support; `LocalTransport` lacks them too, so that it counts the same bytes."""


def lower(exchanging: Exchanging, ops: Ops, world: World, missing: frozenset[type]) -> Exchanging:
    """Replace the messages that a transport does not support.

    Args:
        exchanging: The exchange.
        ops: Primitives of the framework.
        world: The ranks that take part.
        missing: Kinds of collectives that the transport does not support.
    """
    if not missing:
        return exchanging

    def answer(message: Collective) -> Generator[Collective, Any, Any]:
        if isinstance(message, SaturatingSum) and SaturatingSum in missing:
            return (yield from _saturating_sum(ops, message, world.within(message.scope)))
        if isinstance(message, ReduceScatter) and ReduceScatter in missing:
            return (yield from _reduce_scatter(ops, message, world.within(message.scope)))
        return (yield message)

    return rewrite(exchanging, answer)


def _reduce_scatter(ops: Ops, message: ReduceScatter, world: World) -> Generator[Collective, Any, Array]:
    """Sum at the rank that receives the sum: half the traffic of an allreduce."""
    shape, dtype = message.array.shape, ops.dtype(message.array)
    data = ops.to_bytes(ops.reshape(message.array, (-1,)))
    received = yield AllToAll(ops.reshape(data, (world.size, -1)), message.scope)
    (rows,) = ops.from_bytes(ops.reshape(received, (-1,)), (dtype, int(shape[0]) * int(shape[1])))
    return sum_rows(ops, ops.reshape(rows, (world.size, -1)), world.size)


def _saturating_sum(ops: Ops, message: SaturatingSum, world: World) -> Generator[Collective, Any, Array]:
    """Sum and clip on the server of each shard, which saturates once instead of at each hop."""
    n = int(message.array.shape[0])
    part = -(-n // world.size)
    parts = ops.reshape(ops.pad(message.array, part * world.size), (world.size, part))
    received = yield AllToAll(parts, message.scope)
    everyone = yield AllGather(ops.saturating_sum(received, message.bits, message.zero, part), scope=message.scope)
    return ops.from_bytes(ops.reshape(everyone, (-1,)), ("uint8", part * world.size))[0][:n]
