"""Performs the collectives of a method with `horovod.tensorflow`, while a graph is traced."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Branch,
    Broadcast,
    Collective,
    Exchange,
    Exchanging,
)
from hvd_compress.group import Group
from hvd_compress.ops import wrong_length
from hvd_compress.ops.tensorflow import TensorFlowOps

Tensor: TypeAlias = Any
T = TypeVar("T")


def drive(exchanging: Exchanging, name: str, group: Group, after: Tensor) -> tuple[Exchange, Tensor]:
    """Build the graph of an exchange.

    Args:
        exchanging: The exchange of a method.
        name: Prefix of the names of its collectives; the same on all ranks.
        group: The ranks that take part.
        after: What is there when all ranks are known to be in the same step, without which they might branch apart.

    Returns:
        What the exchange ends with, and the payload bytes of a step (an int64 scalar).
    """
    reply: Any = None
    sent: Tensor = tf.constant(0, tf.int64)
    number = 0
    while True:
        try:
            message = exchanging.send(reply)
        except StopIteration as end:
            return _guarded(end.value), sent
        where = f"{name}.{number}"
        if isinstance(message, Branch):
            reply, more = _branch(message, where, group, after)
            sent += more
        else:
            reply = perform(message, where, group)
            sent += tf.size(message.array, tf.int64) * message.array.dtype.size
        number += 1


def _guarded(exchange: Exchange) -> Exchange:
    """Let the new state wait for the total, so that it is not there if what came from other ranks was refused."""
    with tf.control_dependencies([exchange.total]):
        state = tf.nest.map_structure(lambda leaf: tf.identity(leaf) if tf.is_tensor(leaf) else leaf, exchange.state)
    return exchange._replace(state=state)


def _branch(message: Branch, name: str, group: Group, after: Tensor) -> tuple[Exchange, Tensor]:
    def build(number: int, start: Callable[[], Exchanging]) -> tuple[Any, Tensor]:
        exchange, sent = drive(start(), f"{name}.{number}", group, after)
        # None cannot leave a branch.
        exchange = exchange._replace(**{name: () for name, part in exchange._asdict().items() if part is None})
        return tf.nest.map_structure(tf.convert_to_tensor, exchange), sent

    branches = [lambda n=n, start=start: build(n, start) for n, start in enumerate(message.branches)]
    with tf.control_dependencies([after]):
        index = tf.identity(message.index)
    exchange, sent = tf.switch_case(index, branches)
    return exchange, sent


def perform(message: Collective, name: str, group: Group) -> Tensor:
    """Build the operation for one collective.

    Args:
        message: What the method asks for.
        name: The same on all ranks.
        group: The ranks that take part.

    Returns:
        The reply.
    """
    array = message.array
    where = {"name": name, "process_set": group.process_set, "ignore_name_scope": True}
    if isinstance(message, AllReduce):
        op = hvd.Max if message.op == "max" else hvd.Sum
        return hvd.mpi_ops._allreduce(array, op=op, **where)
    if isinstance(message, AllGather):
        gathered = hvd.allgather(array, **where)
        return gathered if message.ragged else _rows(gathered, [group.world.size, array.shape[0]])
    if isinstance(message, AllToAll):
        splits = tf.fill([group.world.size], array.shape[1])
        received, _ = hvd.alltoall(tf.reshape(array, [-1]), splits, **where)
        return _rows(received, array.shape)
    assert isinstance(message, Broadcast)
    return hvd.broadcast(array, group.global_rank(message.root), **where)


def _rows(reply: Tensor, shape: Any) -> Tensor:
    """One row for each rank: Horovod lets ranks send as much as they like."""
    size, row = shape
    reply = TensorFlowOps().check(reply, tf.size(reply, tf.int64) == size * row, wrong_length())
    # A reshape to all of the shape would make Grappler think that it fits, and drop the check.
    return tf.ensure_shape(tf.reshape(reply, [size, -1]), shape)


def gather_bytes(data: bytes, name: str, group: Group) -> bytes:
    """Join the bytes of all ranks, in the order of ranks; at once, even while a graph is traced."""

    def gather() -> bytes:
        mine = tf.constant(np.frombuffer(data, np.uint8))
        return bytes(hvd.allgather(mine, name=name, process_set=group.process_set).numpy())

    return outside_of_graphs(gather)


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
