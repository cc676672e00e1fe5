"""Performs the collectives of a method with `mpi4py`, one after another."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hvd_compress.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, SaturatingSum, World
from hvd_compress.errors import ExchangeError
from hvd_compress.mpi.operators import half, saturating_sum
from hvd_compress.ops import wrong_length

Arr: TypeAlias = npt.NDArray[Any]

_NATIVE = {"sum": MPI.SUM, "max": MPI.MAX}


class Driver:
    """The ranks of a communicator.

    Args:
        comm: An intracommunicator. It is duplicated in the first collective, so that messages of others never get in
            between.

    Attributes:
        world: This process and the number of processes.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._given = comm
        self._own: MPI.Comm | None = None
        self._closed = False
        self.world = World(comm.Get_rank(), comm.Get_size())

    @property
    def _comm(self) -> MPI.Comm:
        if self._closed:
            raise ExchangeError("this aggregator is closed: make a new one, or close it later")
        if self._own is None:
            self._own = self._given.Dup()
        return self._own

    def close(self) -> None:
        """Free the duplicate, the same on all ranks; there can be no collective after it."""
        if self._own is not None:
            self._own.Free()
        self._own, self._closed = None, True

    def perform(self, message: Collective) -> Arr:
        """Do a collective, the same on all ranks. The reply is a new array, unless the message's was donated."""
        array = np.asarray(message.array, order="C")
        if isinstance(message, AllReduce):
            return self._reduce(array, message)
        if isinstance(message, SaturatingSum):
            reply = np.empty_like(array)
            self._comm.Allreduce([array, MPI.BYTE], [reply, MPI.BYTE], saturating_sum(message.bits, message.zero))
            return reply
        if isinstance(message, AllGather):
            return self._gather_ragged(array) if message.ragged else self._gather(array)
        if isinstance(message, AllToAll):
            self._check_alike(array)
            reply = np.empty_like(array)
            self._comm.Alltoall([array, MPI.BYTE], [reply, MPI.BYTE])
            return reply
        assert isinstance(message, Broadcast)
        reply = array.copy()
        self._comm.Bcast([reply, MPI.BYTE], root=message.root)
        return reply

    def _reduce(self, array: Arr, message: AllReduce) -> Arr:
        op, kind = _NATIVE[message.op], array.dtype
        if kind == np.float16:  # MPI knows it as a number of 16 bits, so that it cuts no element in two
            op, kind = half(message.op), np.dtype(np.uint16)
        if message.donate and array.flags.writeable:
            self._comm.Allreduce(MPI.IN_PLACE, array.view(kind), op)
            return array
        reply = np.empty_like(array)
        self._comm.Allreduce(array.view(kind), reply.view(kind), op)
        return reply

    def _check_alike(self, array: Arr) -> None:
        """Refuse arrays that differ in length, on all ranks: MPI would cut them off, or leave gaps."""
        extremes = np.empty(2, np.int64)
        self._comm.Allreduce(np.array([array.size, -array.size], np.int64), extremes, MPI.MAX)
        longest, shortest = extremes[0], -extremes[1]
        if longest != shortest:
            raise ExchangeError(wrong_length(longest, shortest))

    def _gather(self, array: Arr) -> Arr:
        self._check_alike(array)
        reply = np.empty((self.world.size, array.size), array.dtype)
        self._comm.Allgather([array, MPI.BYTE], [reply, MPI.BYTE])
        return reply

    def _gather_ragged(self, array: Arr) -> Arr:
        sizes = np.empty(self.world.size, np.int64)
        self._comm.Allgather(np.array([array.size], np.int64), sizes)
        reply = np.empty(sizes.sum(), np.uint8)
        self._comm.Allgatherv([array, MPI.BYTE], [reply, sizes.tolist(), MPI.BYTE])
        return reply

    def highest(self, number: int) -> int:
        """The largest of a small number of each rank; one byte on the wire."""
        reply = np.empty(1, np.int8)
        self._comm.Allreduce(np.array([number], np.int8), reply, MPI.MAX)
        return int(reply[0])

    def gather_bytes(self, data: bytes) -> bytes:
        """Join the bytes of all ranks, in the order of ranks."""
        return self._gather_ragged(np.frombuffer(data, np.uint8)).tobytes()
