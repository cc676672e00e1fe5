"""Performs the collectives of a method with `torch.distributed`, without waiting for them."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceScatterOptions,
)
from torch.distributed.distributed_c10d import _get_process_group_store

from hvd_compress.core.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    ReduceScatter,
    Scope,
    World,
)
from hvd_compress.transport.lowering import LACKS
from hvd_compress.transport.nodes import launched

_MOST_CONNECTIONS = 256
"""Connections of a rank for buckets of their own; with more of them, buckets take turns."""

_SERIALS: WeakKeyDictionary[dist.ProcessGroup, count[int]] = WeakKeyDictionary()
"""Numbers of the connections of each process group, the same on all ranks."""

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@atexit.register
def _release_tensors() -> None:
    """Let Gloo's threads release their last tensors: one that asks for the GIL later aborts the process."""
    time.sleep(0.05)


class _Both(NamedTuple):
    """Handle of two collectives."""

    first: Any
    second: Any

    def is_completed(self) -> bool:
        return bool(self.first.is_completed()) and bool(self.second.is_completed())

    def wait(self) -> None:
        self.first.wait()
        self.second.wait()


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


@dataclass
class _Ragged:
    """A gathering of arrays of several lengths on its way: of their lengths, then of the arrays, filled up.

    Attributes:
        lengths: The first gathering.
        gather: Starts the second one, given the lengths.
    """

    lengths: Pending
    gather: Callable[[list[int]], Pending]
    _rows: Pending | None = None

    def done(self) -> bool:
        """Return whether the reply has arrived."""
        return self.lengths.done() and self._gathering().done()

    def result(self) -> Tensor:
        """Wait for the reply and return it."""
        return self._gathering().result()

    def begin(self) -> None:
        """Wait for the lengths, and start the second gathering."""
        self._gathering()

    def _gathering(self) -> Pending:
        if self._rows is None:
            self._rows = self.gather(self.lengths.result().view(-1).tolist())
        return self._rows


class _Moved(NamedTuple):
    """A collective on its way on a GPU, whose reply is wanted on the CPU."""

    handle: Pending | _Ragged

    def done(self) -> bool:
        """Return whether the reply has arrived."""
        return self.handle.done()

    def result(self) -> Tensor:
        """Wait for the reply and return it."""
        return self.handle.result().cpu()


class _Connector(NamedTuple):
    """Makes Gloo backends.

    Attributes:
        store: Store by which the ranks find each other.
        options: Options of the backends, such as their timeout.
    """

    store: Any
    options: Any

    def channel(self, name: str, world: World, members: Sequence[int] = ()) -> GroupTransport:
        """Return a transport with connections of its own; all its ranks call it at the same time."""
        forth, back = (
            ProcessGroupGloo(PrefixStore(f"{name}.{way}", self.store), world.rank, world.size, self.options)
            for way in ("forth", "back")
        )
        return GroupTransport(forth, world, back, _Connector(PrefixStore(name, self.store), self.options), members)


def store_of(group: dist.ProcessGroup) -> Any:
    """Return the store of a process group, by another connection: a thread may wait in its own for other ranks."""
    store: Any = _get_process_group_store(group)
    return store.clone()


@dataclass(frozen=True)
class GroupTransport:
    """The ranks of a process group, over Gloo, NCCL or MPI.

    Collectives of a process group have no names: all ranks must start them in the same order. Over Gloo, each
    bucket therefore has connections of its own, so that its second round need not wait for other buckets.

    Attributes:
        group: The process group, or a backend of its kind.
        world: This process among those of the group.
        back: Another backend, for what an alltoall sends to lower ranks; None to use ``group``.
        connector: Connects the ranks within a node and across nodes; None for a process group.
        members: The ranks, as the job numbers them; empty for those of a bucket, or of a scope.
    """

    group: Any
    world: World
    back: Any = field(default=None, compare=False)
    connector: _Connector | None = field(default=None, compare=False)
    members: Sequence[int] = field(default=(), compare=False)
    _channels: dict[str, GroupTransport] = field(default_factory=dict, compare=False)
    _scopes: dict[Scope, GroupTransport] = field(default_factory=dict, compare=False)

    ordered = True

    def __del__(
        self, sleep: Callable[[float], None] = time.sleep, exiting: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        """Let the threads of own connections release their last tensors.

        For that they need the GIL, which is held while they are joined: a model that was deleted right after its last
        step hung. When the interpreter ends, a thread that asks for the GIL aborts the process instead.
        """
        if self.connector is not None and not exiting():
            sleep(0.01)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> GroupTransport:
        """Return the ranks of a process group that this process belongs to."""
        members = dist.get_process_group_ranks(group)
        return cls(group, launched(members, dist.get_rank(), os.environ), members=tuple(members))

    def channels(self, keys: Sequence[str]) -> dict[str, GroupTransport] | None:
        """Return a transport for each bucket, if its collectives need not be ordered with those of others.

        All ranks call it at the same time.
        """
        others = self.world.size - 1 + sum(scope.world.size - 1 for scope in self._scopes.values())
        if not self.over_gloo or not 0 < 2 * len(keys) * others <= _MOST_CONNECTIONS:
            return None
        for key in keys:
            if key not in self._channels:
                self._channels[key] = self._connected(f"channel.{len(self._channels)}", self.world)
                if self._scopes:
                    self._channels[key].connect()
        return self._channels

    def connect(self) -> None:
        """Connect the ranks within nodes and across nodes. All ranks call it at the same time."""
        if self._scopes or not self.world.multilevel:
            return
        scopes: tuple[Scope, Scope] = ("node", "across")
        for scope in scopes:
            ranks, world = self.world.ranks(scope), self.world.within(scope)
            if self.connector is not None or self.over_gloo:
                self._scopes[scope] = self._connected(f"{scope}.{ranks[0]}", world)
            else:
                group = dist.new_group([self.members[rank] for rank in ranks], use_local_synchronization=True)
                self._scopes[scope] = GroupTransport(group, world)

    def among(self, ranks: Sequence[int], name: str) -> GroupTransport:
        """Return a transport of some of these ranks over Gloo, with connections of its own.

        Args:
            ranks: The ranks, ascending; this one is among them. They call it at the same time.
            name: Name that is the same on them, and another one in each call.
        """
        members = tuple(self.members[rank] for rank in ranks)
        world = launched(members, self.members[self.world.rank], os.environ)
        return self._own_connector.channel(f"hvd_compress.{name}", world, members)

    def _connected(self, name: str, world: World) -> GroupTransport:
        """Return a transport over Gloo, with connections of its own."""
        if self.connector is None:
            name = f"hvd_compress.{next(_SERIALS.setdefault(self.group, count()))}.{name}"
        return self._own_connector.channel(name, world)

    @property
    def _own_connector(self) -> _Connector:
        if self.connector is not None:
            return self.connector
        return _Connector(store_of(self.group), self.group._get_backend(torch.device("cpu")).options)

    @cached_property
    def over_gloo(self) -> bool:
        """Whether Gloo performs all collectives."""
        return self.connector is not None or all(
            one.endswith(":gloo") for one in dist.get_backend_config(self.group).split(",")
        )

    @cached_property
    def missing(self) -> frozenset[type]:
        """Unsupported collectives; Gloo's reduce-scatter is an allreduce, which sends twice as much as an alltoall."""
        return LACKS | {ReduceScatter} if self.back is None and self.over_gloo else LACKS

    @property
    def epoch(self) -> Any:
        """The group: there is another one after ``destroy_process_group``."""
        return self.group

    def renewed(self) -> GroupTransport:
        """Return the same ranks: those of a process group never change."""
        return self

    @cached_property
    def _device(self) -> torch.device | None:
        """The only device whose tensors the backend takes; None if it takes those of the CPU."""
        if isinstance(self.group, ProcessGroupGloo):
            return None
        backends = dist.get_backend_config(self.group)
        return None if "cpu:" in backends else torch.device("cuda", torch.cuda.current_device())

    def start(self, message: Collective, name: str) -> Pending | _Ragged | _Moved:
        """Start a collective; within a node or across nodes only after `connect`."""
        if message.scope != "world":
            return self._scopes[message.scope].start(message._replace(scope="world"), name)
        array = message.array.contiguous()
        if self._device is None or array.is_cuda:
            return self._start(message, array)
        return _Moved(self._start(message, array.to(self._device)))

    def _start(self, message: Collective, array: Tensor) -> Pending | _Ragged:
        if isinstance(message, AllReduce):
            array = array if message.donate else array.clone()
            options: Any = AllreduceOptions()
            options.reduceOp = _OPS[message.op]
            return Pending(self.group.allreduce([array], options), lambda: array)
        if isinstance(message, ReduceScatter) and self.back is not None:
            return self._add_rows(array)
        if isinstance(message, ReduceScatter):
            row = array.new_empty(array[0].numel())
            return Pending(self.group._reduce_scatter_base(row, array.view(-1), ReduceScatterOptions()), lambda: row)
        if isinstance(message, AllGather):
            return self._gather_ragged(array) if message.ragged else self._gather(array)
        if isinstance(message, AllToAll):
            reply = torch.empty_like(array)
            if self.back is not None and not array.is_cuda:
                reply[self.world.rank] = array[self.world.rank]
                return Pending(self._exchange(array, reply), lambda: reply)
            work = self.group.alltoall_base(reply.view(-1), array.view(-1), [], [], AllToAllOptions())
            return Pending(work, lambda: reply.view(self.world.size, -1))
        assert isinstance(message, Broadcast)
        array = array.clone()
        options_of_root = BroadcastOptions()
        options_of_root.rootRank = message.root
        return Pending(self.group.broadcast([array], options_of_root), lambda: array)

    def _add_rows(self, array: Tensor) -> Pending:
        """Reduce-scatter: send each row to its rank, which adds those that it receives to its own."""
        rank, rows = self.world.rank, torch.empty_like(array)

        def total() -> Tensor:
            received = [row for other, row in enumerate(rows) if other != rank]
            total: Tensor = received[0].add_(array[rank])
            for row in received[1:]:
                total.add_(row)
            return total

        return Pending(self._exchange(array, rows), total)

    def _exchange(self, array: Tensor, reply: Tensor) -> _Both:
        """Send rows to higher ranks by one connection and to lower ones by another.

        A connection of Gloo has half its speed if both ends send at the same time.
        """
        rank, size, n = self.world.rank, self.world.size, array.shape[1]
        below, above = [n] * rank + [0] * (size - rank), [0] * (rank + 1) + [n] * (size - rank - 1)
        sides = (
            (self.group, reply[:rank], array[rank + 1 :], below, above),
            (self.back, reply[rank + 1 :], array[:rank], above, below),
        )
        return _Both(
            *(
                group.alltoall_base(to.view(-1), rows.view(-1), counts, sent, AllToAllOptions())
                for group, to, rows, counts, sent in sides
            )
        )

    def _gather(self, array: Tensor) -> Pending:
        rows = array.new_empty(self.world.size, array.numel())
        return Pending(self.group._allgather_base(rows.view(-1), array, AllgatherOptions()), lambda: rows)

    def _gather_ragged(self, array: Tensor) -> _Ragged:
        """Gather arrays of several lengths, filled up to the longest: backends gather equal ones only."""

        def gather(lengths: list[int]) -> Pending:
            rows = self._gather(torch.nn.functional.pad(array, (0, max(lengths) - array.numel())))
            return Pending(rows.work, lambda: torch.cat([row[:n] for row, n in zip(rows.read(), lengths, strict=True)]))

        ragged = _Ragged(self._gather(torch.tensor([array.numel()], device=array.device)), gather)
        if not isinstance(self.group, ProcessGroupGloo):
            ragged.begin()  # where the order counts, both follow each other
        return ragged
