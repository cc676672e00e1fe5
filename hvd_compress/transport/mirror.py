"""Transport of a rank without the others: to count, to time and to judge an exchange."""

from __future__ import annotations

from typing import Any

from hvd_compress.core.collectives import AllGather, AllToAll, Collective, ReduceScatter, Scope, World
from hvd_compress.ops import Ops
from hvd_compress.transport.protocol import Done


class Mirror:
    """Answer each collective from what this rank sends: others send the same to be gathered, and add zero to sums.

    So payloads have the size that they have among other ranks, or nearly so; with one rank, they have their contents.

    Args:
        world: The ranks.
        ops: Primitives of the framework.
        missing: Collectives that the real transport does not support.

    Attributes:
        world: The ranks.
        missing: Collectives that it does not support.
        rounds: Number of collectives so far, but for those within a node.
        bytes_sent: Bytes that would have left the node of this rank; see `wire`.
    """

    epoch = 0

    def __init__(self, world: World, ops: Ops, missing: frozenset[type]) -> None:
        self.world = world
        self.missing = missing
        self.rounds = 0
        self.bytes_sent = 0.0
        self._ops = ops

    def start(self, message: Collective, name: str) -> Done:
        """Answer a collective at once."""
        del name
        world, kind = self.world, type(message).__name__
        if message.scope != "node":
            self.rounds += 1
            self.bytes_sent += message.array.nbytes * wire(kind, message.scope, world.size, world.local_size)
        return Done(self._reply(message, *world.within(message.scope)[:2]))

    def _reply(self, message: Collective, rank: int, size: int) -> Any:
        array = message.array
        if isinstance(message, ReduceScatter):
            return array[rank]
        if isinstance(message, AllGather | AllToAll):
            row = array if isinstance(message, AllGather) else array[rank]
            rows = self._ops.concat([row] * size)
            return rows if isinstance(message, AllGather) and message.ragged else self._ops.reshape(rows, (size, -1))
        return array


def share(kind: str, size: int) -> float:
    """Return what a rank sends on average, in units of its payload; with rings, as in Gloo.

    An allreduce passes every part of the array round twice, once to be summed and once to be spread: ``2 (n - 1) / n``
    of the array from each rank. An allgather passes each rank's array on n - 1 times. An alltoall keeps a rank's own
    row, ``1 / n`` of its array, at home, and so does a reduce-scatter. A broadcast reaches n - 1 ranks.
    """
    part = (size - 1) / size
    return {"AllReduce": 2 * part, "AllGather": size - 1.0}.get(kind, part)


def wire(kind: str, scope: Scope, size: int, local_size: int) -> float:
    """Return what a node sends to others, in units of the payload of a rank; if there is but one, what a rank sends.

    In a ring, ranks of a node are neighbours, and so one of them alone sends to another node. In an alltoall, each of
    them sends to all that are elsewhere. Across nodes, each of them communicates with ranks of other nodes only.
    """
    if scope == "across":
        return local_size * share(kind, size // local_size)
    if kind == "AllToAll" and local_size < size:
        return local_size * (size - local_size) / size
    return share(kind, size)
