"""A sum in three collectives of other scopes: within the nodes, between them, and within them again."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import (
    AllGather,
    AllReduce,
    Array,
    Broadcast,
    Exchange,
    Exchanging,
    ReduceScatter,
    State,
    World,
)
from hvd_compress.methods.base import Method
from hvd_compress.ops import Ops


@dataclass(frozen=True)
class Hierarchical(Method):
    """Each rank owns a part of its node's sum, and adds it up with the owners of that part on the other nodes."""

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, keep: bool = False
    ) -> Exchanging:
        part = -(-bucket.numel // world.local_size)
        rows = ops.reshape(ops.pad(x, part * world.local_size), (world.local_size, part))
        mine = yield ReduceScatter(rows, "node")
        mine = yield AllReduce(mine, scope="across")
        gathered = yield AllGather(ops.to_bytes(mine), scope="node")
        (total,) = ops.from_bytes(ops.reshape(gathered, (-1,)), (bucket.dtype, part * world.local_size))
        first = yield Broadcast(ops.zeros((1,), bucket.dtype) + world.node, 0, "node")  # its own number, on each node
        return Exchange(total[: bucket.numel] + (first - world.node), state)
