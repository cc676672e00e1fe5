"""Ok-Topk: the largest coordinates of the sum, by a payload that does not grow with the number of ranks."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Exchange,
    Exchanging,
    SentIndices,
    World,
)
from hvd_compress.core.method import MOST_STEPS, Card, Example, Method, check_range, check_whole, register
from hvd_compress.core.state_tree import Private
from hvd_compress.methods.sparse import SparseLayout, check_indices, ragged, sparse_layout
from hvd_compress.ops import DAMAGED, Ops, wrong_length
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.code import count

Piece: TypeAlias = tuple[Array, Array]
"""Ascending indices and their values."""


class OkTopKState(NamedTuple):
    """State of Ok-Topk.

    Attributes:
        left: Number of steps before the one in which the thresholds are evaluated again.
        local: Threshold of this rank's coordinates: a scalar.
        shared: Threshold of the sums: a scalar.
    """

    left: int
    local: Private
    shared: Array


class Rows(NamedTuple):
    """Byte layout of messages of equal length.

    Attributes:
        bucket: The bucket that the indices belong to.
        capacity: Largest number of indices in a message.
    """

    bucket: Bucket
    capacity: int

    @property
    def wire(self) -> SparseLayout:
        """Layout of indices and values."""
        return sparse_layout(self.bucket, self.bucket.dtype)

    def length(self, n: int) -> int:
        """Return the number of bytes that ``n`` indices and their values take."""
        pages = self.wire.pages if self.wire.pages > 1 else 0
        return 4 + 4 * pages + n * (np.dtype(self.wire.values).itemsize + 2)

    def write(self, ops: Ops, piece: Piece) -> Array:
        """Return a message: the number of indices, the indices and values, and zeros up to the length of all."""
        indices, values = piece
        message = f"the ranks have selected different numbers of coordinates; {DAMAGED}"
        indices = ops.check(indices, indices.shape[0] <= self.capacity, message)
        return ops.pad(ops.to_bytes(*ragged(ops, self.wire, indices, values)), self.length(self.capacity))

    def read(self, ops: Ops, rows: Array) -> list[Piece]:
        """Undo `write`, given one message per rank."""
        found, expected = int(rows.shape[1]), self.length(self.capacity)
        rows, pieces = ops.check(rows, found == expected, wrong_length(found, expected)), []
        for rank in range(int(rows.shape[0])):
            n = int(ops.from_bytes(rows[rank][:4], ("int32", 1))[0][0])
            n = ops.check(n, 0 <= n <= self.capacity, f"rank {rank} sent an invalid number of indices; {DAMAGED}")
            indices, values = self.wire.read(ops, rows[rank][4 : self.length(n)], n)
            pieces.append((check_indices(ops, indices, self.bucket, f"rank {rank}"), values))
        return pieces


@register
@dataclass(frozen=True)
class OkTopK(Method):
    """Sparse allreduce: each rank sums a region, and all ranks receive the largest sums.

    With n ranks, p_i the gradient of rank i plus its residual, and k the target number of coordinates (Algorithm 1)::

        S_i = {j : |p_i[j]| >= t_i}                      sent to the owners of their regions   (alltoall)
        s[j] = sum_{i : j in S_i} p_i[j]                 by the owner of j
        T = {j : |s[j]| >= t}                            sent to all ranks                     (allgather)
        total = sum_{j in T} s[j] e_j                    e_i = p_i - p_i restricted to S_i and T

    The boundary after region r is the mean over the ranks of the (r/n)-quantile of S_i (allreduce, 8 bytes each). Every
    ``period`` steps t_i becomes the k-th largest of ``|p_i|``, and t that of ``|s|``; in between they are reused. If an
    owner has more than twice its share of T, the coordinates are first dealt out evenly (alltoall).

    The paper bounds what a rank sends by ``6 k (n-1)/n`` words, whatever n is. Here it is less than ``22.5 k (n-1)/n``
    bytes, as a coordinate takes 6 bytes, plus what messages say of the number of coordinates. For that (ours):

    * Boundaries are those of the step; the paper keeps them for 64 steps.
    * Messages of all ranks have equal lengths. An owner gets at most 1.25 k/n coordinates of a rank, the largest; T has
      at most 1.25 k, and in the step that evaluates t at most 2 k/n of each owner. Residuals keep the others.
    * If S_i or T has less than 2/3 k or more than 1.25 k coordinates, its threshold is evaluated again: that of S_i at
      once, that of T in the next step. The authors' code changes it by 1 % a step.

    Args:
        ratio: Share of the coordinates that each rank sends, and that the total has, in (0, 1].
        period: Steps between two evaluations of the thresholds; 32 or 128 in the paper's experiments.
    """

    name = "oktopk"
    family = "sparse"
    card = Card(
        paper="Li, Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, 2022",
        collective="allreduce, alltoall, 1 or 2 allgathers",
        keeps="thresholds",
        claim="3.29 to 12.95 times the throughput of other allreduces, dense and sparse, for BERT on 256 GPUs",
        examples=(Example("oktopk:ratio=0.1"),),
        lossless=("oktopk:ratio=1,period=1",),
        compared=("oktopk:ratio=0.0625", "oktopk:ratio=0.0156"),
        learns=True,
    )
    feedback = True
    lags = True
    retains = True

    ratio: float = 0.01
    period: int = 32

    def __post_init__(self) -> None:
        check_range("ratio", self.ratio, "in (0, 1]", 0 < self.ratio <= 1)
        check_whole("period", self.period, 1, MOST_STEPS)

    def init(self, ops: Ops, bucket: Bucket, world: World) -> OkTopKState:
        return OkTopKState(0, ops.zeros((), bucket.dtype), ops.zeros((), bucket.dtype))

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: OkTopKState, world: World, return_error: bool = False
    ) -> Exchanging:
        k, due, local = count(self.ratio, bucket.numel), state.left == 0, state.local
        found = None if due else _above(ops, x, local)
        if found is None or not _fits(int(found.shape[0]), k):
            local = ops.kth_magnitude(x, k)
            found = _above(ops, x, local)

        # 1. Split and reduce.
        edges = yield from _edges(ops, bucket, found, world)
        rows = Rows(bucket, -(-5 * k // (4 * world.size)))
        sent = [_largest(ops, x, part, rows.capacity) for part in _split(ops, found, edges)]
        received = yield from _deal(ops, rows, [(part, ops.take(x, part)) for part in sent])
        sums = ops.scatter_sum(bucket.numel, bucket.dtype, received)
        start, stop = edges[world.rank : world.rank + 2]

        # 2. Balance and allgather.
        mine = _above(ops, sums[start:stop], 0.0 if due else state.shared) + start
        if due:
            pieces, shared = yield from _evaluate(ops, bucket, sums, mine, k, world)
            n = sum(int(indices.shape[0]) for indices, _ in pieces)
        else:
            pieces, n = yield from _reuse(ops, bucket, sums, mine, k, world)
            shared = state.shared
        left = (self.period if due else state.left) - 1 if _fits(n, k) else 0

        total = ops.scatter_sum(bucket.numel, bucket.dtype, pieces)
        indices = ops.concat(sent)
        indices = ops.take(indices, ops.nonzero(ops.take(total, indices) != 0))
        error = ops.put(x, indices, 0.0) if return_error else None
        return Exchange(total, OkTopKState(left, local, shared), error, SentIndices(indices))


def _fits(n: int, k: int) -> bool:
    """Return whether a threshold that selects ``n`` coordinates can stay."""
    return 2 * k <= 3 * n and 4 * n <= 5 * k


def _above(ops: Ops, x: Array, threshold: Any) -> Array:
    """Return the indices of the nonzero magnitudes that are at least a threshold."""
    found = ops.above(x, threshold)
    return ops.take(found, ops.nonzero(ops.take(x, found) != 0))


def _largest(ops: Ops, x: Array, indices: Array, most: int) -> Array:
    """Return those of the ascending indices that have the largest magnitudes."""
    return indices if indices.shape[0] <= most else ops.take(indices, ops.top_indices(ops.take(x, indices), most))


def _split(ops: Ops, indices: Array, edges: Sequence[int]) -> list[Array]:
    """Split ascending indices by regions."""
    ends = [int(ops.sum(ops.cast(indices < edge, "int64"))) for edge in edges]
    return ops.split(indices, [end - begin for begin, end in pairwise(ends)])


def _edges(ops: Ops, bucket: Bucket, found: Array, world: World) -> Generator[Collective, Any, list[int]]:
    """Return the ends of regions that each have about as many of the large coordinates of a rank."""
    cuts: Sequence[Array] = ()
    if world.size > 1:
        n, ranks = int(found.shape[0]), np.arange(1, world.size)
        quantiles = ops.constant(ranks * (n or bucket.numel) // world.size)
        cuts = yield AllReduce(ops.take(found, quantiles) if n else quantiles)
    return [0, *(int(cut) // world.size for cut in cuts), bucket.numel]


def _deal(ops: Ops, rows: Rows, pieces: list[Piece]) -> Generator[Collective, Any, list[Piece]]:
    """Send each rank a piece, and return those received from each rank."""
    messages = ops.concat([rows.write(ops, piece) for piece in pieces])
    return rows.read(ops, (yield AllToAll(ops.reshape(messages, (len(pieces), -1)))))


def _evaluate(
    ops: Ops, bucket: Bucket, sums: Array, mine: Array, k: int, world: World
) -> Generator[Collective, Any, tuple[list[Piece], Array]]:
    """Return the k largest sums, and the magnitude of the smallest of them."""
    rows = Rows(bucket, -(-2 * k // world.size))
    mine = _largest(ops, sums, mine, rows.capacity)
    pieces = rows.read(ops, (yield AllGather(rows.write(ops, (mine, ops.take(sums, mine))))))
    indices, values = (ops.concat(list(parts)) for parts in zip(*pieces, strict=True))
    n = int(values.shape[0])
    best = _largest(ops, values, ops.arange(n), k)
    return [(ops.take(indices, best), ops.take(values, best))], ops.kth_magnitude(ops.pad(values, max(n, k)), k)


def _reuse(
    ops: Ops, bucket: Bucket, sums: Array, mine: Array, k: int, world: World
) -> Generator[Collective, Any, tuple[list[Piece], int]]:
    """Return the sums above the threshold, and their number before it was limited."""
    head = ops.constant(np.array([mine.shape[0]], np.int32))
    heads = ops.reshape((yield AllGather(ops.to_bytes(head))), (-1,))
    (found,) = ops.from_bytes(heads, ("int32", world.size))
    message = f"a rank has selected an invalid number of coordinates; {DAMAGED}"
    counts = [int(n) for n in ops.check(found, (found >= 0) & (found <= bucket.numel), message)]
    n, most = sum(counts), 5 * k // 4
    if n > most:
        counts = [-(-one * most // n) for one in counts]
        mine = _largest(ops, sums, mine, counts[world.rank])
    piece = mine, ops.take(sums, mine)

    if max(counts) * world.size > 2 * sum(counts):
        ends = [int(mine.shape[0]) * rank // world.size for rank in range(world.size + 1)]
        parts = [(piece[0][begin:end], piece[1][begin:end]) for begin, end in pairwise(ends)]
        received = yield from _deal(ops, Rows(bucket, -(-max(counts) // world.size)), parts)
        piece = ops.concat([indices for indices, _ in received]), ops.concat([values for _, values in received])
        counts = [sum(-(-one // world.size) for one in counts)]
    rows = Rows(bucket, max(counts))
    return rows.read(ops, (yield AllGather(rows.write(ops, piece)))), n
