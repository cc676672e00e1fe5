"""Hierarchy: dense sums within a node, compression between nodes."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Exchange,
    Exchanging,
    ReduceScatter,
    UnsentMask,
    World,
    rewrite,
)
from hvd_compress.core.method import Method, Wrapper, clear
from hvd_compress.core.state_tree import NodePart
from hvd_compress.methods.cast import to_half
from hvd_compress.methods.sparse import check_indices, ragged, read_ragged, sparse_layout
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array, Shape
from hvd_compress.ops.code import Code
from hvd_compress.ops.totals import EncodedSum, SparseSum, dense

INSIDE = Code("max", 8, 128, dither=False)
"""Code of gradients within a node."""


class HierarchicalState(NamedTuple):
    """State of `Hierarchical`.

    Attributes:
        inner: State of the wrapped method, for the part of the bucket that this rank owns.
    """

    inner: NodePart


class Piece(NamedTuple):
    """Coordinates ``start .. stop - 1`` of a bucket, and their shape."""

    start: int
    stop: int
    shape: Shape


class Parts(NamedTuple):
    """Partition of a bucket among the ranks of a node.

    Attributes:
        pieces: Pieces of each part, in the order of coordinates; a part may be empty.
        length: Number of coordinates of the longest part, at least 1; others are padded.
    """

    pieces: tuple[tuple[Piece, ...], ...]
    length: int


@dataclass(frozen=True)
class Hierarchical(Wrapper):
    """Sum the gradients of a node without compression, and compress only what nodes exchange.

    The n ranks of a node own a part of the bucket each::

        s = sum over the node of part i             (reduce-scatter within the node)
        t = exchange of s with the owners of part i on the other nodes, by the wrapped method
        total = all parts t                         (allgather within the node)

    So a node sends 1/n of what its ranks would gather one by one, and the compression error is that of one sum per
    node. On a single node, sums are exact. Error feedback belongs around this wrapper: a residual is added to the
    gradient of its rank, whichever part it lies in, so its sum over the ranks holds if nodes or buckets change.

    Parts are equal slices of the bucket. Methods that approximate matrices get whole matrices, and blocks of rows of
    matrices that are larger than a part. A reduce-scatter has no last step: part i of the bucket has what the i-th
    ranks of all nodes are to receive (qgZ of Wang et al., ZeRO++, 2023).

    Args:
        inner: The method between nodes, without error feedback.
        inside: ``"none"``, or ``"fp16"`` to communicate in 16 bits within a node; ``"int8"`` for gradients in 8 bits
            there, and totals as they are. Error feedback also keeps the rounding errors of gradients, and with
            ``"fp16"`` what is clipped of them beyond +-32768 / n for n ranks, but not the rounding errors of totals.
        masks: Return the coordinates that the node sent, for momentum correction.
    """

    inside: str = "none"
    masks: bool = False

    @property
    def hierarchical(self) -> bool:
        return True

    @property
    def supports_feedback(self) -> bool:
        return self.inner.supports_feedback

    def init(self, ops: Ops, bucket: Bucket, world: World) -> HierarchicalState:
        if world.local_size == 1:
            return HierarchicalState(self.inner.init(ops, bucket, world))
        part = part_of(bucket, self._parts(bucket, world), world.local_rank)
        return HierarchicalState(self.inner.init(ops, part, world.within("across")))

    def _parts(self, bucket: Bucket, world: World) -> Parts:
        return (deal if self.inner.matrixwise else cut)(bucket.shapes, world.local_size)

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: HierarchicalState, world: World, return_error: bool = False
    ) -> Exchanging:
        if world.local_size == 1:
            flat = yield from self.inner.exchange(ops, bucket, x, state.inner, world, return_error)
            return flat._replace(state=HierarchicalState(flat.state))
        if world.nodes == 1:
            exact = yield AllReduce(x)
            return Exchange(exact, state, ops.zeros((bucket.numel,), bucket.dtype) if return_error else None)
        parts, me = self._parts(bucket, world), world.local_rank
        part = part_of(bucket, parts, me)
        mine, rounded = yield from self._sum(ops, bucket, split(ops, parts, x), world, return_error)
        mine = mine[: part.numel]
        inner = self.inner.exchange(ops, part, mine, state.inner, world.within("across"), return_error)
        exchange: Exchange = yield from rewrite(inner, _across)
        total: EncodedSum
        if isinstance(exchange.total, SparseSum):
            total = yield from self._gather_sparse(ops, bucket, parts, exchange.total)
        else:
            total = yield from self._gather(ops, bucket, parts, dense(ops, exchange.total))
        error = self._error(ops, parts, me, x, exchange.error, rounded) if return_error else None
        masked = None
        if return_error and self.masks and exchange.sent_indices is not None:
            ones = ops.zeros((part.numel,), bucket.dtype) + 1
            masked = yield from self._unsent_mask(ops, parts, clear(ops, ones, exchange.sent_indices))
        return Exchange(total, HierarchicalState(exchange.state), error, masked)

    @property
    def supports_reduce_scatter(self) -> bool:
        return self.inner.supports_reduce_scatter

    def reduce_scatter(
        self, ops: Ops, bucket: Bucket, x: Array, state: HierarchicalState, world: World, return_error: bool = False
    ) -> Exchanging:
        if world.local_size == 1:
            flat = yield from self.inner.reduce_scatter(ops, bucket, x, state.inner, world, return_error)
            return flat._replace(state=HierarchicalState(flat.state))
        if world.nodes == 1:
            total = yield ReduceScatter(ops.reshape(x, (world.size, -1)))
            return Exchange(total, state, ops.zeros((bucket.numel,), bucket.dtype) if return_error else None)
        parts, me = self._parts(bucket, world), world.local_rank
        part = part_of(bucket, parts, me)
        x = swapped(ops, x, world.nodes, world.local_size)
        mine, rounded = yield from self._sum(ops, bucket, split(ops, parts, x), world, return_error)
        inner = self.inner.reduce_scatter(ops, part, mine, state.inner, world.within("across"), return_error)
        exchange: Exchange = yield from rewrite(inner, _across)
        error = self._error(ops, parts, me, x, exchange.error, rounded) if return_error else None
        error = None if error is None else swapped(ops, error, world.local_size, world.nodes)
        return Exchange(exchange.total, HierarchicalState(exchange.state), error)

    dense = Method.dense  # the inner method has a part of the bucket only

    def flush(
        self, ops: Ops, bucket: Bucket, x: Array, state: HierarchicalState, world: World
    ) -> tuple[Array, HierarchicalState]:
        if world.local_size == 1:
            x, inner = self.inner.flush(ops, bucket, x, state.inner, world)
            return x, HierarchicalState(inner)
        parts, me = self._parts(bucket, world), world.local_rank
        part = part_of(bucket, parts, me)
        nothing = ops.zeros((part.numel,), bucket.dtype)
        mine, inner = self.inner.flush(ops, part, nothing, state.inner, world.within("across"))
        kept = self._error(ops, parts, me, ops.zeros((bucket.numel,), bucket.dtype), mine)
        return ops.add(x, kept), HierarchicalState(inner)

    def _sum(
        self, ops: Ops, bucket: Bucket, rows: Array, world: World, return_error: bool
    ) -> Generator[Collective, Any, tuple[Array, Array | None]]:
        """Sum rows over the node.

        Returns:
            The row of this rank, and what rounding has cut off from all rows, if it is asked for and there is some.
        """
        local, length = (int(size) for size in rows.shape)
        if self.inside == "int8":
            codes, error = ops.quantise_parts(ops.reshape(rows, (-1,)), local, INSIDE, 0, return_error)
            received = yield AllToAll(codes, "node")
            rounded = ops.reshape(error, (local, -1)) if return_error else None
            return ops.dequantise(received, INSIDE, length, bucket.dtype), rounded
        clips = return_error or self.inner.scaleless  # else an overflow shall be seen
        sent = self._cast(ops, rows, world.size if clips else None)
        mine = yield ReduceScatter(sent, "node")
        rounds = return_error and self.inside == "fp16"
        return ops.cast(mine, bucket.dtype), rows - ops.cast(sent, bucket.dtype) if rounds else None

    def _cast(self, ops: Ops, x: Array, ranks: int | None = None) -> Array:
        return to_half(ops, x, ranks) if self.inside == "fp16" else x

    def _gather(self, ops: Ops, bucket: Bucket, parts: Parts, mine: Array) -> Generator[Collective, Any, Array]:
        """Return the whole vector, given the part of each rank of the node."""
        sent = self._cast(ops, ops.pad(mine, parts.length))
        size = len(parts.pieces) * parts.length
        gathered = yield AllGather(ops.to_bytes(sent), scope="node")
        (rows,) = ops.from_bytes(ops.reshape(gathered, (-1,)), (ops.dtype(sent), size))
        return join(ops, parts, ops.reshape(ops.cast(rows, bucket.dtype), (-1, parts.length)))

    @staticmethod
    def _gather_sparse(
        ops: Ops, bucket: Bucket, parts: Parts, mine: SparseSum
    ) -> Generator[Collective, Any, SparseSum]:
        """Return the whole sparse sum, given the part of each rank of the node; parts are slices of the bucket."""
        part_buckets = [part_of(bucket, parts, number) for number in range(len(parts.pieces))]
        values = ops.dtype(mine.pieces[0][1])
        wires = [sparse_layout(part, values) for part in part_buckets for _ in mine.pieces]
        own = sparse_layout(Bucket("", ((mine.size,),), bucket.dtype), values)
        sent = [array for indices, those in mine.pieces for array in ragged(ops, own, indices, those)]
        gathered = yield AllGather(ops.to_bytes(*sent), ragged=True, scope="node")
        pieces = []
        for number, (indices, those) in enumerate(read_ragged(ops, gathered, wires)):
            owner = number // len(mine.pieces)
            indices = check_indices(ops, indices, part_buckets[owner], f"rank {owner} of the node")
            if parts.pieces[owner]:
                pieces.append((indices + owner * parts.length, those))
        return SparseSum(pieces, bucket.numel, bucket.dtype)

    @staticmethod
    def _unsent_mask(ops: Ops, parts: Parts, mine: Array) -> Generator[Collective, Any, UnsentMask]:
        """Return the coordinates that no rank of the node sent, given those of the part of each rank as ones."""
        packed = ops.pack(ops.cast(ops.pad(mine, parts.length), "uint8"), 1)
        gathered = yield AllGather(packed, scope="node")
        rows = [ops.unpack(gathered[i], 1, parts.length) for i in range(len(parts.pieces))]
        return UnsentMask(join(ops, parts, ops.reshape(ops.concat(rows), (-1, parts.length))))

    @staticmethod
    def _error(ops: Ops, parts: Parts, me: int, x: Array, mine: Array, rounded: Array | None = None) -> Array:
        """Return the error of the bucket: that of the part of this rank, and what rounding has cut off, if anything.

        May overwrite ``x``, which may be the memory of ``rounded``.
        """
        if rounded is not None:
            nothing = ops.zeros(tuple(x.shape), ops.dtype(x))
            return Hierarchical._error(ops, parts, me, nothing, mine) + join(ops, parts, rounded)
        if _in_order(parts):
            numel = sum(piece.stop - piece.start for piece in parts.pieces[me])
            return ops.only(x, min(me * parts.length, int(x.shape[0])), mine[:numel])
        row, dtype = ops.pad(mine, parts.length), ops.dtype(mine)
        before, after = me * parts.length, (len(parts.pieces) - me - 1) * parts.length
        rows = ops.concat([ops.zeros((before,), dtype), row, ops.zeros((after,), dtype)])
        return join(ops, parts, ops.reshape(rows, (-1, parts.length)))


def _across(message: Collective) -> Generator[Collective, Any, Any]:
    return (yield message._replace(scope="across"))


@cache
def cut(shapes: tuple[Shape, ...], parts: int) -> Parts:
    """Cut a bucket into slices of equal length; the last ones may be shorter."""
    numel = sum(map(math.prod, shapes))
    length = -(-numel // parts)
    bounds = [min(i * length, numel) for i in range(parts + 1)]
    return Parts(tuple((Piece(a, b, (b - a,)),) if b > a else () for a, b in pairwise(bounds)), max(length, 1))


@cache
def deal(shapes: tuple[Shape, ...], parts: int) -> Parts:
    """Deal out the matrices of a bucket, the largest ones first, to the part that has least so far.

    Matrices that are larger than an equal share are cut into blocks of rows.
    """
    share = -(-sum(map(math.prod, shapes)) // parts)
    pieces: list[Piece] = []
    for shape, end in zip(shapes, accumulate(map(math.prod, shapes)), strict=True):
        size = math.prod(shape)
        rows = shape[0] if shape else 1
        blocks = min(rows, -(-size // share))
        bounds = [rows * i // blocks for i in range(blocks + 1)]
        width, start = size // rows, end - size
        pieces += [Piece(start + a * width, start + b * width, (b - a, *shape[1:])) for a, b in pairwise(bounds)]
    dealt: list[list[Piece]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for piece in sorted(pieces, key=lambda one: one.start - one.stop):
        least = loads.index(min(loads))
        dealt[least].append(piece)
        loads[least] += piece.stop - piece.start
    return Parts(tuple(tuple(sorted(part)) for part in dealt), max(*loads, 1))


def swapped(ops: Ops, x: Array, outer: int, inner: int) -> Array:
    """Swap the first two dimensions of a flat array of shape ``(outer, inner, n)``."""
    rows = ops.reshape(x, (outer, -1))
    n = int(rows.shape[1]) // inner
    return ops.concat([ops.reshape(rows[:, i * n : (i + 1) * n], (-1,)) for i in range(inner)])


def part_of(bucket: Bucket, parts: Parts, number: int) -> Bucket:
    """Return a part as a bucket; an empty part has one coordinate, which is zero."""
    shapes = tuple(piece.shape for piece in parts.pieces[number]) or ((1,),)
    return Bucket(f"{bucket.key}.{number}", shapes, bucket.dtype)


def _in_order(parts: Parts) -> bool:
    """Return whether the parts follow each other without gaps, except for the padding at the end."""
    filled = [piece for part in parts.pieces for piece in part]
    full = all(part[0].start == i * parts.length for i, part in enumerate(parts.pieces) if part)
    return full and all(a.stop == b.start for a, b in pairwise(filled))


def split(ops: Ops, parts: Parts, x: Array) -> Array:
    """Return the parts of a vector as the rows of a matrix, padded with zeros."""
    if _in_order(parts):
        return ops.reshape(ops.pad(x, len(parts.pieces) * parts.length), (-1, parts.length))
    rows = [ops.pad(ops.concat([x[a:b] for a, b, _ in part] or [x[:0]]), parts.length) for part in parts.pieces]
    return ops.reshape(ops.concat(rows), (-1, parts.length))


def join(ops: Ops, parts: Parts, rows: Array) -> Array:
    """Undo `split`."""
    numel = sum(piece.stop - piece.start for part in parts.pieces for piece in part)
    if _in_order(parts):
        return ops.reshape(rows, (-1,))[:numel]
    found: list[tuple[int, Array]] = []
    for number, part in enumerate(parts.pieces):
        ends = accumulate(piece.stop - piece.start for piece in part)
        for piece, end in zip(part, ends, strict=True):
            found.append((piece.start, rows[number, end - (piece.stop - piece.start) : end]))
    return ops.concat([values for _, values in sorted(found, key=lambda one: one[0])])
