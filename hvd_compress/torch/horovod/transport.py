"""Transport over `horovod.torch`, with asynchronous collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch
from torch import Tensor

from hvd_compress.core.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    ReduceScatter,
)
from hvd_compress.errors import ExchangeError
from hvd_compress.ops import wrong_length
from hvd_compress.torch.horovod import caller
from hvd_compress.torch.waiting import nap
from hvd_compress.transport.groups import HorovodGroup
from hvd_compress.transport.protocol import Handle


class Pending(NamedTuple):
    """Collective in flight.

    Attributes:
        handle: Horovod's handle.
        read: Converts Horovod's result to the reply that the method expects.
    """

    handle: int
    read: Callable[[Any], Tensor]

    def done(self) -> bool:
        """Return whether the result has arrived."""
        return bool(hvd.poll(self.handle))

    def result(self) -> Tensor:
        """Wait for the result asleep; Horovod's own wait would compete with its communication thread for the core."""
        begin = time.monotonic()
        while not self.done():
            nap(begin)
        return self.read(hvd.synchronize(self.handle))


class Together(NamedTuple):
    """Collective of a node in flight; it completes once all nodes have started theirs.

    Otherwise the first node to finish may exit, which shuts down Horovod on all ranks. In each cycle, Horovod handles
    collectives of all ranks before those of process sets, so ``inner`` completes on all nodes in the cycle in which
    ``others`` does, or earlier.

    Attributes:
        inner: The collective.
        others: Allreduce of all ranks, started after it.
    """

    inner: Pending
    others: Pending

    def done(self) -> bool:
        """Return whether the result has arrived, and all ranks have started."""
        return self.inner.done() and self.others.done()

    def result(self) -> Tensor:
        """Wait for all ranks to start, and for the result; return it."""
        self.others.result()
        return self.inner.result()


@dataclass(frozen=True)
class HorovodTransport(HorovodGroup):
    """Transport over the ranks of a Horovod process set."""

    library = hvd

    @property
    def epoch(self) -> tuple[int, int]:
        """Identifier of the process set and of the start of Horovod."""
        return self.process_set.process_set_id, caller.incarnation()

    def start(self, message: Collective, name: str) -> Handle:
        """Start a collective."""
        group = self.within(message.scope)
        array, where = message.array.contiguous(), {"name": name, "process_set": group.process_set}
        size = group.world.size
        if isinstance(message, AllReduce):
            op = hvd.Max if message.op == "max" else hvd.Sum
            start = hvd.allreduce_async_ if message.donate else hvd.allreduce_async
            return Pending(start(array, op=op, **where), _whole)
        if isinstance(message, ReduceScatter):
            if array.is_cuda:
                return Pending(hvd.reducescatter_async(array, op=hvd.Sum, **where), torch.flatten)
            return _reduce_scatter(array, group.world.rank, where)
        if isinstance(message, AllGather):
            read = torch.flatten if message.ragged else partial(_rows, size, array.numel())
            gather = Pending(hvd.allgather_async(array, **where), read)
            return gather if message.scope != "node" else Together(gather, self._everyone(f"{name}.everyone"))
        if isinstance(message, AllToAll):
            row = array[0].numel()
            splits = torch.full((size,), row, dtype=torch.int32, device="cpu")
            handle = hvd.alltoall_async(array.flatten(), splits, **where)
            return Pending(handle, lambda reply: _rows(size, row, reply[0]))
        assert isinstance(message, Broadcast)
        return Pending(hvd.broadcast_async(array, group.global_rank(message.root), **where), _whole)

    def _everyone(self, name: str) -> Pending:
        """Start an allreduce that completes once all ranks have started it."""
        nothing = torch.zeros(1, dtype=torch.float32, device="cpu")
        return Pending(hvd.allreduce_async_(nothing, op=hvd.Sum, name=name, process_set=self.process_set), _whole)


def _reduce_scatter(rows: Tensor, rank: int, where: dict[str, Any]) -> Pending:
    """Send each row to its rank and add: over Gloo, Horovod's own takes five times as long."""
    size, row = rows.shape
    splits = torch.full((size,), row, dtype=torch.int32, device="cpu")
    splits[rank] = 0
    if rank in (0, size - 1):
        others = rows[1:] if rank == 0 else rows[:-1]
    else:
        others = torch.cat([rows[:rank], rows[rank + 1 :]])
    handle = hvd.alltoall_async(others.flatten(), splits, **where)

    def read(reply: Any) -> Tensor:
        received = _rows(size - 1, row, reply[0])
        total = received[0].add_(rows[rank])
        for other in received[1:]:
            total.add_(other)
        return total

    return Pending(handle, read)


def _whole(reply: Tensor) -> Tensor:
    return reply


def _rows(size: int, row: int, reply: Tensor) -> Tensor:
    """Reshape a reply to one row per rank, after checking its length: Horovod lets ranks send different lengths."""
    if reply.numel() != size * row:
        raise ExchangeError(wrong_length())  # without lengths, which may differ between ranks
    return reply.view(size, row)
