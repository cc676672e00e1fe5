"""Transport over `horovod.tensorflow`, with eager collectives on numpy arrays, one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.core.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter, World
from hvd_compress.errors import ExchangeError
from hvd_compress.ops import wrong_length
from hvd_compress.tensorflow.host import Arr
from hvd_compress.transport.groups import HorovodGroup
from hvd_compress.transport.protocol import Done


@dataclass(frozen=True)
class EagerTransport(HorovodGroup):
    """The ranks of a process set of Horovod. A collective is over when it has been started."""

    library = hvd

    def start(self, message: Collective, name: str) -> Done:
        """Perform one collective."""
        return Done(self._perform(message, name))

    def _perform(self, message: Collective, name: str) -> Arr:
        group = self.within(message.scope)
        array, size = np.asarray(message.array), group.world.size
        where = {"name": name, "process_set": group.process_set}
        if isinstance(message, AllReduce):
            op = hvd.Max if message.op == "max" else hvd.Sum
            return _numpy(hvd.mpi_ops._allreduce(tf.constant(array), op=op, **where))
        if isinstance(message, ReduceScatter):
            return _reduce_scatter(array, group.world, where)
        if isinstance(message, AllGather):
            gathered = _numpy(hvd.allgather(tf.constant(array), **where))
            return gathered if message.ragged else _rows(gathered, size, array.size)
        if isinstance(message, AllToAll):
            splits = np.full(size, array.shape[1], np.int32)
            return _rows(_alltoall(array, splits, where), *array.shape)
        assert isinstance(message, Broadcast)
        return _numpy(hvd.broadcast(tf.constant(array), group.global_rank(message.root), **where))

    def gather_bytes(self, data: bytes, name: str) -> bytes:
        """Join the bytes of all ranks, in the order of ranks."""
        return self._perform(AllGather(np.frombuffer(data, np.uint8), ragged=True), name).tobytes()

    def has_same_size(self) -> bool:
        """Return whether Horovod still has as many ranks in the process set."""
        return bool(self.process_set.size() == self.world.size)


def _reduce_scatter(rows: Arr, world: World, where: dict[str, Any]) -> Arr:
    """Send each row to its rank and add: over Gloo, Horovod's own takes five times as long."""
    size, row = rows.shape
    splits = np.full(size, row, np.int32)
    splits[world.rank] = 0
    others = np.delete(rows, world.rank, axis=0)
    total: Arr = rows[world.rank] + _rows(_alltoall(others, splits, where), size - 1, row).sum(axis=0)
    return total


def _alltoall(rows: Arr, splits: Arr, where: dict[str, Any]) -> Arr:
    received, _ = hvd.alltoall(tf.constant(rows.reshape(-1)), tf.constant(splits), **where)
    return _numpy(received)


def _numpy(reply: Any) -> Arr:
    """Return the memory of a reply, which is no one else's."""
    array: Arr = reply._numpy()
    return array


def _rows(reply: Arr, size: int, row: int) -> Arr:
    """Reshape a reply to one row per rank, after checking its length: Horovod lets ranks send different lengths."""
    if reply.size != size * row:
        raise ExchangeError(wrong_length())  # without lengths, which may differ between ranks
    return reply.reshape(size, row)
