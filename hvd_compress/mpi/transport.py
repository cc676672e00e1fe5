"""Performs the collectives of a method with `mpi4py`, one after another."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hvd_compress.core.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    ReduceScatter,
    SaturatingSum,
    Scope,
    World,
)
from hvd_compress.engine.stats import Meter
from hvd_compress.errors import ExchangeError
from hvd_compress.mpi.operators import half, saturating_sum
from hvd_compress.ops import wrong_length
from hvd_compress.transport.nodes import placed
from hvd_compress.transport.protocol import Done

Arr: TypeAlias = npt.NDArray[Any]

_NATIVE = {"sum": MPI.SUM, "max": MPI.MAX}


def _found(comm: MPI.Comm) -> World:
    """Return the world of this process, with the ranks that share its memory as its node."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    world = placed(range(comm.Get_size()), comm.Get_rank(), node.Get_rank(), node.Get_size())
    node.Free()
    return world


class MPITransport:
    """The ranks of a communicator. A collective is over when it has been started.

    Args:
        comm: An intracommunicator. It is duplicated in the first collective, so that messages of others never get in
            between.
        meter: Counts the time of collectives.
        local_size: Number of ranks on each node, which are numbered node by node; None to ask MPI.

    Attributes:
        world: This process among those of the communicator.
    """

    missing: frozenset[type] = frozenset()
    epoch = 0

    def __init__(self, comm: MPI.Comm, meter: Meter | None = None, local_size: int | None = None) -> None:
        self._given = comm
        self._own: dict[Scope, MPI.Comm] = {}
        self._closed = False
        self._meter = Meter() if meter is None else meter
        rank, size = comm.Get_rank(), comm.Get_size()
        self.world = _found(comm) if local_size is None else World(rank, size, local_size)

    def _comm(self, scope: Scope = "world") -> MPI.Comm:
        """Return the communicator of a scope; made when all ranks first need it."""
        if self._closed:
            raise ExchangeError("this aggregator is closed: make a new one, or close it later")
        if scope not in self._own:
            first = self.world.ranks(scope)[0]
            self._own[scope] = self._given.Dup() if scope == "world" else self._given.Split(first, self.world.rank)
        return self._own[scope]

    def close(self) -> None:
        """Free what was duplicated, the same on all ranks; there can be no collective after it."""
        for comm in self._own.values():
            comm.Free()
        self._own, self._closed = {}, True

    def start(self, message: Collective, name: str = "") -> Done:
        """Do a collective, the same on all ranks. The reply is a new array, unless the message's was donated."""
        del name  # all ranks have the same order
        with self._meter.time("wait"):
            return Done(self._perform(message, self._comm(message.scope)))

    def _perform(self, message: Collective, comm: MPI.Comm) -> Arr:
        array = np.asarray(message.array, order="C")
        if isinstance(message, AllReduce):
            return self._reduce(array, message, comm)
        if isinstance(message, ReduceScatter):
            reply = np.empty(array.shape[1:], array.dtype)
            comm.Reduce_scatter_block(array, reply)
            return reply
        if isinstance(message, SaturatingSum):
            reply = np.empty_like(array)
            comm.Allreduce([array, MPI.BYTE], [reply, MPI.BYTE], saturating_sum(message.bits, message.zero))
            return reply
        if isinstance(message, AllGather):
            return self._gather_ragged(array, comm) if message.ragged else self._gather(array, comm)
        if isinstance(message, AllToAll):
            self._check_alike(array, comm)
            reply = np.empty_like(array)
            comm.Alltoall([array, MPI.BYTE], [reply, MPI.BYTE])
            return reply
        assert isinstance(message, Broadcast)
        reply = array.copy()
        comm.Bcast([reply, MPI.BYTE], root=message.root)
        return reply

    def _reduce(self, array: Arr, message: AllReduce, comm: MPI.Comm) -> Arr:
        op, kind = _NATIVE[message.op], array.dtype
        if kind == np.float16:  # MPI knows it as a number of 16 bits, so that it cuts no element in two
            op, kind = half(message.op), np.dtype(np.uint16)
        if message.donate and array.flags.writeable:
            comm.Allreduce(MPI.IN_PLACE, array.view(kind), op)
            return array
        reply = np.empty_like(array)
        comm.Allreduce(array.view(kind), reply.view(kind), op)
        return reply

    def _check_alike(self, array: Arr, comm: MPI.Comm) -> None:
        """Refuse arrays that differ in length, on all ranks: MPI would cut them off, or leave gaps."""
        extremes = np.empty(2, np.int64)
        comm.Allreduce(np.array([array.size, -array.size], np.int64), extremes, MPI.MAX)
        longest, shortest = extremes[0], -extremes[1]
        if longest != shortest:
            raise ExchangeError(wrong_length(longest, shortest))

    def _gather(self, array: Arr, comm: MPI.Comm) -> Arr:
        self._check_alike(array, comm)
        reply = np.empty((comm.Get_size(), array.size), array.dtype)
        comm.Allgather([array, MPI.BYTE], [reply, MPI.BYTE])
        return reply

    def _gather_ragged(self, array: Arr, comm: MPI.Comm) -> Arr:
        sizes = np.empty(comm.Get_size(), np.int64)
        comm.Allgather(np.array([array.size], np.int64), sizes)
        reply = np.empty(sizes.sum(), np.uint8)
        comm.Allgatherv([array, MPI.BYTE], [reply, sizes.tolist(), MPI.BYTE])
        return reply

    def highest(self, number: int) -> int:
        """The largest of a small number of each rank; one byte on the wire."""
        reply = np.empty(1, np.int8)
        self._comm().Allreduce(np.array([number], np.int8), reply, MPI.MAX)
        return int(reply[0])

    def gather_bytes(self, data: bytes) -> bytes:
        """Join the bytes of all ranks, in the order of ranks."""
        return self._gather_ragged(np.frombuffer(data, np.uint8), self._comm()).tobytes()
