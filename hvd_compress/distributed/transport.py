"""Performs the collectives of a method with `torch.distributed`, without waiting for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from hvd_compress.core.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter, World
from hvd_compress.core.lowering import LACKS
from hvd_compress.errors import ExchangeError

# PyTorch 2.13 has renamed them.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Pending(NamedTuple):
    """A collective on its way.

    Attributes:
        work: The handle of `torch.distributed`.
        read: Returns the reply that the method expects.
    """

    work: Any
    read: Callable[[], Tensor]

    def done(self) -> bool:
        """Return whether the reply has arrived."""
        return bool(self.work.is_completed())

    def result(self) -> Tensor:
        """Wait for the reply and return it.

        Raises:
            RuntimeError: From PyTorch, if another rank is gone or does not answer within the timeout of its group.
        """
        self.work.wait()
        return self.read()


@dataclass(frozen=True)
class GroupTransport:
    """The ranks of a process group, over Gloo, NCCL or MPI.

    Collectives of a process group have no names: all ranks must start them in the same order.

    Attributes:
        group: The process group.
        world: This process among those of the group.
    """

    group: dist.ProcessGroup
    world: World

    ordered = True

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Self:
        """Return the ranks of a process group that this process belongs to."""
        return cls(group, World(group.rank(), group.size()))

    @cached_property
    def missing(self) -> frozenset[type]:
        """Unsupported collectives; Gloo's reduce-scatter is an allreduce, which sends twice as much as an alltoall."""
        return LACKS if "nccl" in dist.get_backend_config(self.group) else LACKS | {ReduceScatter}

    @property
    def epoch(self) -> dist.ProcessGroup:
        """The group: there is another one after ``destroy_process_group``."""
        return self.group

    def renewed(self) -> Self:
        """Return the same ranks: those of a process group never change."""
        return self

    @cached_property
    def _device(self) -> torch.device | None:
        """The only device whose tensors the backend takes; None if it takes those of the CPU."""
        backends = dist.get_backend_config(self.group)
        return None if "cpu:" in backends else torch.device("cuda", torch.cuda.current_device())

    def start(self, message: Collective, name: str) -> Pending:
        """Start a collective.

        Raises:
            ExchangeError: If it is one of some of the ranks.
        """
        if message.scope != "world":
            raise ExchangeError(f"{message.scope=} is not supported: all ranks of the process group take part")
        array = message.array.contiguous()
        if self._device is None or array.is_cuda:
            return self._start(message, array)
        pending = self._start(message, array.to(self._device))
        return Pending(pending.work, lambda: pending.read().cpu())

    def _start(self, message: Collective, array: Tensor) -> Pending:
        where: dict[str, Any] = {"group": self.group, "async_op": True}
        size = self.world.size
        if isinstance(message, AllReduce):
            array = array if message.donate else array.clone()
            return Pending(dist.all_reduce(array, _OPS[message.op], **where), lambda: array)
        if isinstance(message, ReduceScatter):
            row = array.new_empty(array[0].numel())
            return Pending(_REDUCE_SCATTER(row, array.view(-1), **where), lambda: row)
        if isinstance(message, AllGather):
            return self._gather_ragged(array) if message.ragged else self._gather(array)
        if isinstance(message, AllToAll):
            reply = torch.empty_like(array)
            return Pending(
                dist.all_to_all_single(reply.view(-1), array.view(-1), **where), lambda: reply.view(size, -1)
            )
        assert isinstance(message, Broadcast)
        array = array.clone()
        return Pending(dist.broadcast(array, group_src=message.root, **where), lambda: array)

    def _gather(self, array: Tensor) -> Pending:
        rows = array.new_empty(self.world.size, array.numel())
        work = _ALL_GATHER(rows.view(-1), array, group=self.group, async_op=True)
        return Pending(work, lambda: rows)

    def _gather_ragged(self, array: Tensor) -> Pending:
        """Gather arrays of several lengths, filled up to the longest: backends gather equal ones only."""
        length = torch.tensor([array.numel()], device=array.device)
        lengths = [int(n) for n in self._gather(length).result()]
        rows = self._gather(torch.nn.functional.pad(array, (0, max(lengths) - array.numel())))
        return Pending(rows.work, lambda: torch.cat([row[:n] for row, n in zip(rows.read(), lengths, strict=True)]))
