"""Performs the collectives of a method with `horovod.torch`, without waiting for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch
from torch import Tensor

from hvd_compress.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective
from hvd_compress.errors import ExchangeError
from hvd_compress.group import Group
from hvd_compress.ops import wrong_length

_NAP, _SHARE = 50e-6, 0.02
"""Seconds between two looks at what is on its way, at least; and their share of the waiting so far."""


class Pending(NamedTuple):
    """A collective on its way.

    Attributes:
        handle: Horovod's.
        read: Turns Horovod's result into the reply that the method expects.
    """

    handle: int
    read: Callable[[Any], Tensor]

    def done(self) -> bool:
        """Whether the result is there."""
        return bool(hvd.poll(self.handle))

    def wait(self, sleep: Callable[[float], object] = time.sleep) -> Tensor:
        """Wait for the result; asleep, as Horovod's own waiting keeps its communication thread off the core."""
        begin = time.monotonic()
        while not self.done():
            nap(begin, sleep)
        return self.read(hvd.synchronize(self.handle))


def nap(begin: float, sleep: Callable[[float], object] = time.sleep) -> None:
    """Sleep for a moment, a longer one the longer the waiting: cores are few where ranks share a machine.

    Args:
        begin: When the waiting began, of ``time.monotonic``.
        sleep: Sleeps for so many seconds; a condition's ``wait`` gives up its lock meanwhile.
    """
    sleep(max(_NAP, _SHARE * (time.monotonic() - begin)))


def launch(message: Collective, name: str, group: Group) -> Pending:
    """Start a collective.

    Args:
        message: What the method asks for.
        name: The same on all ranks, and of no other collective in flight.
        group: The ranks that take part.
    """
    array, where = message.array.contiguous(), {"name": name, "process_set": group.process_set}
    if isinstance(message, AllReduce):
        op = hvd.Max if message.op == "max" else hvd.Sum
        start = hvd.allreduce_async_ if message.donate else hvd.allreduce_async
        return Pending(start(array, op=op, **where), lambda reply: reply)
    if isinstance(message, AllGather):
        read = torch.flatten if message.ragged else partial(_rows, group.world.size, array.numel())
        return Pending(hvd.allgather_async(array, **where), read)
    if isinstance(message, AllToAll):
        size, row = group.world.size, array[0].numel()
        splits = torch.full((size,), row, dtype=torch.int32, device="cpu")
        handle = hvd.alltoall_async(array.flatten(), splits, **where)
        return Pending(handle, lambda reply: _rows(size, row, reply[0]))
    assert isinstance(message, Broadcast)
    root = group.global_rank(message.root)
    return Pending(hvd.broadcast_async(array, root, **where), lambda reply: reply)


def _rows(size: int, row: int, reply: Tensor) -> Tensor:
    """One row for each rank: Horovod lets ranks send as much as they like."""
    if reply.numel() != size * row:
        raise ExchangeError(wrong_length())  # without numbers, which would differ between ranks
    return reply.view(size, row)


def gather_bytes(data: bytes, name: str, group: Group) -> bytes:
    """Join the bytes of all ranks, in the order of ranks."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return bytes(hvd.allgather(mine, name=name, process_set=group.process_set).numpy())
