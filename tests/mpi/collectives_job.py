"""One rank: every collective is what its message says, on arrays so large that MPI cuts them up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import permutations

import numpy as np
from mpi.common import COMM, RANK, SIZE, Arr, assert_ranks_agree, done

from hvd_compress import LocalWorld
from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Exchange,
    Exchanging,
    ReduceScatter,
    SaturatingSum,
    State,
    World,
)
from hvd_compress.core.method import Method
from hvd_compress.errors import ExchangeError
from hvd_compress.methods.cast import Dense
from hvd_compress.methods.wrappers.hierarchy import Hierarchical, HierarchicalState
from hvd_compress.mpi import Aggregator
from hvd_compress.mpi.transport import MPITransport
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.ops.packing import pack, unpack
from hvd_compress.transport.lockstep import perform
from hvd_compress.transport.protocol import InFlight

N = 200_003
TRANSPORT = MPITransport(COMM)


@dataclass(frozen=True)
class Codes(Method):
    """Rounds to integers of a few bits and adds them up with saturation."""

    bits: int
    zero: int

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, return_error: bool = False
    ) -> Exchanging:
        top = 2**self.bits - 1
        codes = ops.cast(ops.clip(ops.floor(x), -self.zero, top - self.zero) + self.zero, "uint8")
        data = yield SaturatingSum(pack(ops, codes, self.bits), self.bits, self.zero)
        total = ops.cast(unpack(ops, data, self.bits, bucket.numel), bucket.dtype) - self.zero
        return Exchange(total, state)


def integers(low: int, high: int) -> list[Arr]:
    """Integers of each rank in ``low .. high``."""
    rng = np.random.default_rng(0)
    return [rng.integers(low, high + 1, N).astype(np.float64) for _ in range(SIZE)]


def saturating_sums(bits: int, zero: int) -> None:
    method, low, high = Codes(bits, zero), -zero, 2**bits - 1 - zero
    aggregator = Aggregator(method)

    xs = integers(low, high)  # many sums leave the range
    total = np.rint(aggregator.step(xs[RANK]) * SIZE)
    assert_ranks_agree({"total": total})
    assert np.any(total != sum(xs))
    if SIZE == 2:
        np.testing.assert_array_equal(total, np.rint(LocalWorld(method, SIZE).step(xs)[RANK] * SIZE))
    orders = [reduce(lambda a, b: np.clip(a + b, low, high), order) for order in permutations(xs)]
    assert np.all(np.any([total == folded for folded in orders], axis=0)), f"{method}: no order of additions gives this"

    xs = integers(-(zero // SIZE), high // SIZE)  # none can
    np.testing.assert_array_equal(np.rint(aggregator.step(xs[RANK]) * SIZE), sum(xs))
    assert aggregator.stats().bytes_sent == 2 * (-(-N * bits // 8) + 1)


def reductions(dtype: str) -> None:
    arrays = [a.astype(dtype) for a in integers(-600, 600)]  # sums are exact in float16 as well
    for message in (
        AllReduce(arrays[RANK]),
        AllReduce(arrays[RANK], "max"),
        AllReduce(arrays[RANK].copy(), donate=True),
    ):
        (wanted, *_) = perform([message._replace(array=array) for array in arrays], SIZE)
        got = TRANSPORT.start(message).result()
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(arrays[RANK], integers(-600, 600)[RANK])
    assert TRANSPORT.start(AllReduce(np.ones((), dtype))).result().shape == ()


def movements() -> None:
    rng = np.random.default_rng(1)
    fixed = [rng.integers(0, 256, 1001, np.uint8) for _ in range(SIZE)]
    ragged = [rng.integers(0, 256, 500 * (SIZE - rank - 1), np.uint8) for rank in range(SIZE)]  # the last has none
    halves = [rng.standard_normal((3, 5)).astype(np.float16) for _ in range(SIZE)]
    tables = [rng.integers(0, 256, (77, SIZE), np.uint8).T for _ in range(SIZE)]  # not in the order of memory
    rows = [rng.integers(-9, 9, (SIZE, 7)).astype(np.float32) for _ in range(SIZE)]
    groups: list[list[Collective]] = [
        [ReduceScatter(array) for array in rows],
        [AllGather(array) for array in fixed],
        [AllGather(array, ragged=True) for array in ragged],
        [AllToAll(array) for array in tables],
        [Broadcast(array, SIZE - 1) for array in halves],
        [AllGather(np.zeros(0, np.uint8)) for _ in range(SIZE)],
    ]
    for messages in groups:
        got, wanted = TRANSPORT.start(messages[RANK]).result(), perform(messages, SIZE)[RANK]
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_array_equal(got, wanted)
        assert not np.shares_memory(got, messages[RANK].array)


def other_lengths() -> None:
    """One rank sends a byte more: all refuse it, in the same words, and the next collective is sound."""
    longer = np.zeros((SIZE, 9 + (RANK == 1)), np.uint8)
    for message in (AllGather(longer[0]), AllToAll(longer)):
        said = ""
        try:
            TRANSPORT.start(message)
        except ExchangeError as error:
            said = str(error)
        assert "a payload has the wrong length" in said
        assert TRANSPORT.gather_bytes(said.encode()) == SIZE * said.encode()


def scopes() -> None:
    """As all ranks of one node, and as nodes of one rank: sums are what they are in one process."""
    bucket = Bucket("b0", ((7, 9),), "float64")
    xs = [np.arange(63.0) * (rank + 1) for rank in range(SIZE)]
    method = Hierarchical(Dense())
    for local_size in (1, SIZE):
        transport = MPITransport(COMM, local_size=local_size)
        flight = InFlight(method, NumpyOps(), bucket, xs[RANK].copy(), HierarchicalState(()), transport, "")
        while flight.result is None:
            flight.go_on()
        np.testing.assert_array_equal(flight.ended.total, sum(xs))
        transport.close()


if __name__ == "__main__":
    for bits, zero in [(1, 0), (2, 1), (4, 7), (4, 8), (8, 127), (8, 0)]:
        saturating_sums(bits, zero)
    for dtype in ("float16", "float32", "float64", "int32", "int64"):
        reductions(dtype)
    movements()
    other_lengths()
    scopes()
    done()
