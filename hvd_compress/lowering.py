"""What Horovod cannot do in one operation, done in two: an alltoall and an allgather.

Each rank becomes the server of one part of the bucket. It gets that part from everyone, combines it, and gives the
result to everyone: the traffic of a ring allreduce, with any combination of any codes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from hvd_compress.collectives import (
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


def lower(exchanging: Exchanging, ops: Ops, world: World) -> Exchanging:
    """Put messages that Horovod can perform in the place of those that it cannot."""

    def answer(message: Collective | Branch) -> Generator[Collective | Branch, Any, Any]:
        if isinstance(message, SaturatingSum):
            return (yield from _saturating_sum(ops, message, world))
        if isinstance(message, Branch):
            message = Branch(message.index, tuple(partial(_lower_later, b, ops, world) for b in message.branches))
        return (yield message)

    return rewrite(exchanging, answer)


def _lower_later(branch: Callable[[], Exchanging], ops: Ops, world: World) -> Exchanging:
    return lower(branch(), ops, world)


def _saturating_sum(ops: Ops, message: SaturatingSum, world: World) -> Generator[Collective, Any, Array]:
    """Sum and clip on the server of each part, which saturates once instead of at every hop."""
    n = int(message.array.shape[0])
    part = -(-n // world.size)
    received = yield AllToAll(ops.reshape(ops.pad(message.array, part * world.size), (world.size, part)))
    everyone = yield AllGather(ops.saturating_sum(received, message.bits, message.zero, part))
    return ops.from_bytes(ops.reshape(everyone, (-1,)), ("uint8", part * world.size))[0][:n]
