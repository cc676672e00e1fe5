"""Collectives that a transport lacks, made of those that it has.

A saturating sum becomes an alltoall and an allgather: each rank is the server of one part of the bucket. It gets that
part from everyone, combines it, and gives the result to everyone: the traffic of a ring allreduce, with any combination
of any codes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from hvd_compress.core.collectives import (
    AllGather,
    AllToAll,
    Array,
    Branch,
    Collective,
    Exchanging,
    SaturatingSum,
    World,
    rewrite,
)
from hvd_compress.ops import Ops

LACKS: frozenset[type] = frozenset({SaturatingSum})
"""Collectives that Horovod cannot perform. Ranks in one process lack them too, so that the same bytes are counted."""


def lower(exchanging: Exchanging, ops: Ops, world: World, missing: frozenset[type]) -> Exchanging:
    """Put messages that a transport can perform in the place of those that it cannot.

    Args:
        exchanging: The exchange.
        ops: The primitives of the framework at work.
        world: The ranks that take part.
        missing: The kinds of collectives that the transport cannot perform.
    """
    if not missing:
        return exchanging

    def answer(message: Collective | Branch) -> Generator[Collective | Branch, Any, Any]:
        if isinstance(message, SaturatingSum):
            return (yield from _saturating_sum(ops, message, world.within(message.scope)))
        if isinstance(message, Branch):
            message = Branch(message.index, tuple(partial(later, branch) for branch in message.branches))
        return (yield message)

    def later(branch: Callable[[], Exchanging]) -> Exchanging:
        return lower(branch(), ops, world, missing)

    return rewrite(exchanging, answer)


def _saturating_sum(ops: Ops, message: SaturatingSum, world: World) -> Generator[Collective, Any, Array]:
    """Sum and clip on the server of each part, which saturates once instead of at every hop."""
    n = int(message.array.shape[0])
    part = -(-n // world.size)
    parts = ops.reshape(ops.pad(message.array, part * world.size), (world.size, part))
    received = yield AllToAll(parts, message.scope)
    everyone = yield AllGather(ops.saturating_sum(received, message.bits, message.zero, part), scope=message.scope)
    return ops.from_bytes(ops.reshape(everyone, (-1,)), ("uint8", part * world.size))[0][:n]
