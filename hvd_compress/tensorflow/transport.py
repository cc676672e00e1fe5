"""Performs the collectives of a method with `horovod.tensorflow`, while a graph is traced."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, TypeAlias, TypeVar

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.core.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Branch,
    Broadcast,
    Collective,
    Exchange,
    Exchanging,
    ReduceScatter,
    World,
    run,
)
from hvd_compress.ops import wrong_length
from hvd_compress.ops.tensorflow import TensorFlowOps, tensorflow_ops
from hvd_compress.ops.totals import dense
from hvd_compress.transport.groups import HorovodGroup

Tensor: TypeAlias = Any
T = TypeVar("T")


class Built(NamedTuple):
    """A collective that a graph performs when it runs.

    Attributes:
        reply: The tensor that it gives.
    """

    reply: Tensor

    def done(self) -> bool:
        """Whether the reply can be used: always, in a graph."""
        return True

    def result(self) -> Tensor:
        """Return the reply."""
        return self.reply


@dataclass(frozen=True)
class GraphTransport(HorovodGroup):
    """The ranks of a process set of Horovod, in a graph that is being traced."""

    library = hvd

    def start(self, message: Collective, name: str) -> Built:
        """Build the operation for one collective."""
        return Built(self._build(message, name))

    def _build(self, message: Collective, name: str) -> Tensor:
        group = self.within(message.scope)
        array, size = message.array, group.world.size
        where = {"name": name, "process_set": group.process_set, "ignore_name_scope": True}
        if isinstance(message, AllReduce):
            op = hvd.Max if message.op == "max" else hvd.Sum
            return hvd.mpi_ops._allreduce(array, op=op, **where)
        if isinstance(message, ReduceScatter):
            return self._reduce_scatter(array, group.world, where)
        if isinstance(message, AllGather):
            gathered = hvd.allgather(array, **where)
            return gathered if message.ragged else _rows(gathered, [size, array.shape[0]])
        if isinstance(message, AllToAll):
            splits = tf.fill([size], array.shape[1])
            received, _ = hvd.alltoall(tf.reshape(array, [-1]), splits, **where)
            return _rows(received, array.shape)
        assert isinstance(message, Broadcast)
        return hvd.broadcast(array, group.global_rank(message.root), **where)

    @staticmethod
    def _reduce_scatter(rows: Tensor, world: World, where: dict[str, Any]) -> Tensor:
        """Send each row to its rank and add: over Gloo, Horovod's own takes five times as long."""
        size, row = rows.shape
        if tf.config.list_physical_devices("GPU"):
            return tf.reshape(hvd.mpi_ops._reducescatter(rows, op=hvd.Sum, **where), [row])
        others = tf.concat([rows[: world.rank], rows[world.rank + 1 :]], 0)
        splits = [0 if rank == world.rank else row for rank in range(size)]
        received, _ = hvd.alltoall(tf.reshape(others, [-1]), splits, **where)
        return rows[world.rank] + tf.reduce_sum(_rows(received, [size - 1, row]), 0)

    def gather_bytes(self, data: bytes, name: str) -> bytes:
        """Join the bytes of all ranks, in the order of ranks; at once, even while a graph is traced."""

        def gather() -> bytes:
            mine = tf.constant(np.frombuffer(data, np.uint8))
            return bytes(hvd.allgather(mine, name=name, process_set=self.process_set).numpy())

        return outside_of_graphs(gather)


def drive(exchanging: Exchanging, name: str, transport: GraphTransport, after: Tensor) -> tuple[Exchange, Tensor]:
    """Build the graph of an exchange.

    Args:
        exchanging: The exchange of a method.
        name: Prefix of the names of its collectives; the same on all ranks.
        transport: Builds its collectives.
        after: What is there when all ranks are known to be in the same step, without which they might branch apart.

    Returns:
        What the exchange ends with, and the payload bytes of a step as two int64: outside of nodes, and within nodes.
    """
    sent: Tensor = tf.constant([0, 0], tf.int64)
    numbers = count()

    def answer(message: Collective | Branch) -> Any:
        nonlocal sent
        where = f"{name}.{next(numbers)}"
        if isinstance(message, Branch):
            reply, more = _branch(message, where, transport, after)
        else:
            reply = transport.start(message, where).result()
            size = tf.size(message.array, tf.int64) * message.array.dtype.size
            more = tf.stack([0, size] if message.scope == "node" else [size, 0])
        sent += more
        return reply

    return _guarded(run(exchanging, answer)), sent


def _guarded(exchange: Exchange) -> Exchange:
    """Write the total out, and let the new state wait for it: it is not there if what came from others was refused."""
    total = dense(tensorflow_ops(), exchange.total)
    with tf.control_dependencies([total]):
        state = tf.nest.map_structure(lambda leaf: tf.identity(leaf) if tf.is_tensor(leaf) else leaf, exchange.state)
    return exchange._replace(total=total, state=state)


def _branch(message: Branch, name: str, transport: GraphTransport, after: Tensor) -> tuple[Exchange, Tensor]:
    def build(number: int, start: Callable[[], Exchanging]) -> tuple[Any, Tensor]:
        exchange, sent = drive(start(), f"{name}.{number}", transport, after)
        # None cannot leave a branch.
        exchange = Exchange._make(() if part is None else part for part in exchange)
        return tf.nest.map_structure(tf.convert_to_tensor, exchange), sent

    branches = [lambda n=n, start=start: build(n, start) for n, start in enumerate(message.branches)]
    with tf.control_dependencies([after]):
        index = tf.identity(message.index)
    exchange, sent = tf.switch_case(index, branches)
    return exchange, sent


def _rows(reply: Tensor, shape: Any) -> Tensor:
    """One row for each rank: Horovod lets ranks send as much as they like."""
    size, row = shape
    reply = TensorFlowOps().check(reply, tf.size(reply, tf.int64) == size * row, wrong_length())
    # A reshape to all of the shape would make Grappler think that it fits, and drop the check.
    return tf.ensure_shape(tf.reshape(reply, [size, -1]), shape)


def outside_of_graphs(call: Callable[[], T]) -> T:
    """Call a function eagerly although a graph is being traced.

    A new thread has no graph and no variable creator. `tf.init_scope` would keep the creator, which forbids new
    variables in all but the first trace.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # handed on to the waiting thread
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
