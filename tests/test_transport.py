"""Scopes, and exchanges in flight over a transport."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from worlds import FRAMEWORKS, bucket_of, normal, ops_of

from hvd_compress import LocalWorld
from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Exchange,
    Exchanging,
    ReduceScatter,
    State,
    World,
)
from hvd_compress.core.method import Method
from hvd_compress.errors import ExchangeError
from hvd_compress.methods.cast import Dense
from hvd_compress.methods.wrappers.hierarchy import Hierarchical, HierarchicalState
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.transport.lockstep import LocalHandle, LocalTransport, Switchboard, lockstep
from hvd_compress.transport.lowering import lower
from hvd_compress.transport.protocol import InFlight

SUM = Hierarchical(Dense())
"""A sum in three collectives: within the nodes, between them, and within them again."""

SHAPES = [(4, 2), (6, 3), (8, 4), (6, 2), (4, 1), (4, 4), (1, 1)]


@pytest.mark.parametrize(("size", "local_size"), SHAPES)
def test_scopes_divide_the_ranks(size: int, local_size: int) -> None:
    """Each rank is in one node and in one set across nodes, and the two have nothing but that rank in common."""
    for rank in range(size):
        world = World(rank, size, local_size)
        node, across = set(world.ranks("node")), set(world.ranks("across"))
        assert node & across == {rank} and len(node) * len(across) == size
        for scope in ("world", "node", "across"):
            ranks = list(world.ranks(scope))
            within = world.within(scope)
            assert ranks[within.rank] == rank and len(ranks) == within.size


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("size", "local_size"), SHAPES)
def test_a_sum_over_nodes_is_the_sum(framework: str, size: int, local_size: int) -> None:
    bucket = bucket_of((7, 9))
    xs = normal(bucket, size)
    results = lockstep(ops_of(framework), SUM, bucket, xs, [HierarchicalState(())] * size, local_size=local_size)
    for result in results:
        np.testing.assert_allclose(np.asarray(result.total), sum(xs), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(result.total), np.asarray(results[0].total))


def test_bytes_are_counted_by_what_they_cross() -> None:
    """Of 64 float32 numbers, a rank of 2 on a node owns 32, and only those leave the node."""
    world = LocalWorld(SUM, 4, local_size=2)
    world.step([np.ones(64, np.float32)] * 4)
    assert world.bytes_across == 4 * 32
    assert world.bytes_sent == 4 * 64 + 4 * 32 + 4 * 32
    for local_size, across in [(1, 1.0), (4, 0.0)]:
        flat = LocalWorld("topk:ratio=0.5", 4, local_size=local_size)
        flat.step([np.arange(64.0)] * 4)
        assert flat.bytes_across == across * flat.bytes_sent > across - 1


@pytest.mark.parametrize(("size", "local_size"), [(4, 3), (4, 0), (2, 4)])
def test_ranks_must_be_divided_evenly(size: int, local_size: int) -> None:
    with pytest.raises(ExchangeError, match=rf"local_size={local_size} is not allowed: it must divide size={size}"):
        LocalWorld("none", size, local_size=local_size)


class Shares(Method):
    """Sums; each rank has its share of the sum. A transport may lack what it asks for."""

    def __init__(self, missing: frozenset[type]) -> None:
        self.missing = missing

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, return_error: bool = False
    ) -> Exchanging:
        def scatter() -> Exchanging:
            share = yield ReduceScatter(ops.reshape(x, (world.size, -1)))
            return Exchange(share, state)

        return (yield from lower(scatter(), ops, world, self.missing))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("size", [2, 3, 7])
def test_each_rank_sums_its_share_where_the_transport_cannot(framework: str, size: int) -> None:
    """Bit for bit, and for the same bytes: each rank sends each other one its share."""
    ops, bucket = ops_of(framework), bucket_of((size, 10))
    xs, asked = normal(bucket, size), list[Collective]()
    summed = lockstep(ops, Shares(frozenset()), bucket, xs, [()] * size)
    lowered = lockstep(ops, Shares(frozenset({ReduceScatter})), bucket, xs, [()] * size, asked.append)
    for one, other in zip(lowered, summed, strict=True):
        np.testing.assert_array_equal(np.asarray(one.total), np.asarray(other.total))
    (message,) = asked
    assert isinstance(message, AllToAll) and message.array.nbytes == xs[0].nbytes


class Differing(Method):
    """A method with a bug: the first rank wants to sum, the others to gather; or else to do so in another scope."""

    def __init__(self, other: Collective) -> None:
        self.other = other

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, return_error: bool = False
    ) -> Exchanging:
        reply = yield AllReduce(x) if world.rank == 0 else self.other
        return Exchange(reply, state)


@pytest.mark.parametrize(
    "other", [AllGather(np.zeros(3, np.uint8)), AllReduce(np.zeros(3, np.float32), scope="across")]
)
def test_ranks_that_ask_for_other_things_are_told(other: Collective) -> None:
    bucket = bucket_of((3,))
    with pytest.raises(ExchangeError, match=r"must start the same collective, but they started .*AllReduce of"):
        lockstep(NumpyOps(), Differing(other), bucket, normal(bucket, 4), [()] * 4, local_size=2)


def test_nothing_is_started_before_it_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it goes on; and halting waits for what was started, not for what was not."""
    read, awaited = LocalHandle.result, list[LocalHandle]()

    def result(handle: LocalHandle) -> Any:
        awaited.append(handle)
        return read(handle)

    monkeypatch.setattr(LocalHandle, "result", result)
    ops, bucket, admitted = NumpyOps(), bucket_of((3,)), False
    board = Switchboard(1, 1, ops)
    counted: list[Collective] = []
    (world,) = board.worlds
    transport, x = LocalTransport(board, world), np.ones(3, np.float32)
    flight = InFlight(SUM, ops, bucket, x, HierarchicalState(()), transport, "x", counted.append, lambda _: admitted)
    assert not flight.ready() and not counted
    flight.halt()
    admitted = True
    assert flight.ready() and len(counted) == 1 and not awaited
    flight.halt()
    assert len(awaited) == 1
    while flight.result is None:
        flight.go_on()
    np.testing.assert_array_equal(flight.ended.total, np.ones(3))
    assert len(flight.laps) == 1 + len(counted)
