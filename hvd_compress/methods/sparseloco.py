"""SparseLoCo: top-k in square chunks, in two bits, whose total is a mean over the senders of each coordinate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllGather, Exchange, Exchanging, State, World
from hvd_compress.core.method import Card, Example, Method, check_whole, register
from hvd_compress.methods.sparse import check_indices
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array, Shape
from hvd_compress.ops.packing import packed_size

BINS = 4
SIGMAS = 6
"""Width of all bins, in standard deviations."""


@register
@dataclass(frozen=True, kw_only=True)
class SparseLoCo(Method):
    """SparseLoCo's compression of pseudo-gradients: chunked top-k in two bits, and a mean over senders.

    Each tensor, as a matrix of its first dimension by the others, is cut into chunks of at most ``side x side``: their
    sides are the largest divisors of its own. With p_i the gradient of rank i plus 0.95 times its residual, in one
    tensor, S_i the k largest coordinates of each chunk, and m and s the mean and the standard deviation of p_i in S_i::

        bin(v) = round((v - m) / (6 s / 4)) + 2, clipped to 0 .. 3
        C(p_i)[j] = mean of the p_i in S_i that are in the bin of p_i[j], for j in S_i; else 0
        c_i = min(1, median_r ||C(p_r)|| / ||C(p_i)||)
        total[j] = n mean_{i: j in S_i} c_i C(p_i)[j]           e_i = p_i - C(p_i)

    The median is the lower one of two. An index takes 12 bits, so 64 of 64 x 64 take 146 times fewer bytes than
    float32. A coordinate that one of n ranks sends moves by all that this rank sent, not by an n-th of it: the total is
    no sum, and what ranks sent and keep does not add up to it. It is for `LocalSteps`, without an outer momentum.

    The equations are those of the code that its authors run (templar, ``compress.py``).

    Args:
        k: Coordinates that are sent of each chunk, or all of a smaller one: so vectors are sent whole.
        side: Largest side of a chunk, at most 64. A dimension without a divisor near it, such as a prime number, makes
            chunks small, so that much is sent: pad it.
    """

    name = "sparseloco"
    family = "sparse"
    card = Card(
        paper="Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, 2025",
        collective="allgather",
        claim="outperforms DiLoCo in full precision, with 1 to 3% of the coordinates, in 2 bits",
        examples=(Example("sparseloco:k=4,side=8", 25 * 4 * 14 // 8 + 4 * 4, total="senders"),),
        compared=("sparseloco:k=1",),
    )
    feedback = True
    lags = True
    retains = True
    memory: ClassVar[Mapping[str, Any]] = {"decay": 0.95}

    k: int = 64
    side: int = 64

    def __post_init__(self) -> None:
        check_whole("k", self.k, 1, 4096)
        check_whole("side", self.side, 1, 64)

    @property
    def sums(self) -> bool:
        return False

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, return_error: bool = False
    ) -> Exchanging:
        if not bucket.numel:
            return Exchange(x, state, x)
        tensors = [Chunks.of(shape, self.side) for shape in bucket.shapes if math.prod(shape)]
        y = ops.concat([one.cut(ops, part) for one, part in zip(tensors, ops.split(x, sizes(tensors)), strict=True)])
        payload = Payload.of(tensors, self.k, bucket)
        everyone = yield AllGather(payload.write(ops, y))
        sent = [payload.read(ops, everyone[rank], f"rank {rank}") for rank in range(world.size)]

        factors = clip_to_median(ops, [one.norms(ops) for one in sent])
        pieces = [one.piece(ops, factor) for one, factor in zip(sent, factors, strict=True)]
        summed = ops.scatter_sum(bucket.numel, bucket.dtype, pieces)
        ones = ops.zeros((sum(payload.counts),), bucket.dtype) + 1
        senders = ops.scatter_sum(bucket.numel, bucket.dtype, [(indices, ones) for indices, _ in pieces])
        total = join(ops, tensors, summed / ops.where(senders > 0, senders, 1.0) * world.size)
        error = None
        if return_error:
            indices, values = sent[world.rank].piece(ops)
            error = join(ops, tensors, ops.put(y, indices, ops.take(y, indices) - values))
        return Exchange(total, state, error)


class Chunks(NamedTuple):
    """Chunks of equal size that a matrix is cut into.

    Attributes:
        down: Rows of chunks.
        across: Chunks in each.
        height: Rows of a chunk.
        width: Columns of a chunk.
    """

    down: int
    across: int
    height: int
    width: int

    @classmethod
    def of(cls, shape: Shape, side: int) -> Chunks:
        """Return the chunks of a tensor; those of a vector have one row."""
        rows = shape[0] if len(shape) > 1 else 1
        columns = math.prod(shape) // rows
        height, width = (max(d for d in range(1, side + 1) if n % d == 0) for n in (rows, columns))
        return cls(rows // height, columns // width, height, width)

    def cut(self, ops: Ops, x: Array) -> Array:
        """Reorder the flat matrix, one chunk after another."""
        return self._regroup(ops, x, self.down * self.height, self.down)

    def join(self, ops: Ops, x: Array) -> Array:
        """Undo `cut`."""
        return self._regroup(ops, x, self.down, self.down * self.height)

    def _regroup(self, ops: Ops, x: Array, rows: int, into: int) -> Array:
        """Reshape (rows, across, -1) to (into, across, -1), each column by itself."""
        if self.height == 1:
            return x
        columns = ops.reshape(x, (rows, self.across, -1))
        return ops.reshape(ops.stack([ops.reshape(columns[:, j], (into, -1)) for j in range(self.across)]), (-1,))


def sizes(tensors: list[Chunks]) -> list[int]:
    """Return the numbers of coordinates."""
    return [math.prod(one) for one in tensors]


def join(ops: Ops, tensors: list[Chunks], y: Array) -> Array:
    """Undo `Chunks.cut` for the concatenation of several tensors."""
    return ops.concat([one.join(ops, part) for one, part in zip(tensors, ops.split(y, sizes(tensors)), strict=True)])


class Sent(NamedTuple):
    """Coordinates of a rank.

    Attributes:
        indices: Their indices, chunk by chunk.
        codes: Their places in `books`.
        books: Values of the bins, shape (tensors, BINS).
    """

    indices: Array
    codes: Array
    books: Array

    def norms(self, ops: Ops) -> Array:
        """Return the norm of each tensor, as a column."""
        numbers = ops.reshape(ops.histogram(self.codes, math.prod(self.books.shape)), self.books.shape)
        return ops.reshape(ops.norms(self.books * ops.sqrt(ops.cast(numbers, ops.dtype(self.books)))), (-1, 1))

    def piece(self, ops: Ops, factors: Any = 1) -> tuple[Array, Array]:
        """Return the indices and the values, times a factor for each tensor."""
        return self.indices, ops.take(ops.reshape(self.books * factors, (-1,)), self.codes)


class Payload(NamedTuple):
    """Layout of a payload: the books of all tensors, then 12 bits of each index and the code of each value.

    Attributes:
        chunks: The chunks of each tensor.
        counts: Numbers of coordinates that are sent of each tensor.
        starts: Start of the chunk of each.
        firsts: Start of the book of each.
        bucket: The bucket.
    """

    chunks: list[Chunks]
    counts: list[int]
    starts: Any
    firsts: Any
    bucket: Bucket

    @classmethod
    def of(cls, tensors: list[Chunks], k: int, bucket: Bucket) -> Payload:
        """Return the layout for tensors whose chunks send ``k`` coordinates each."""
        kept = [min(k, one.height * one.width) for one in tensors]
        numbers = [one.down * one.across for one in tensors]
        lengths = np.repeat([one.height * one.width for one in tensors], numbers)
        starts = np.repeat(np.cumsum(lengths) - lengths, np.repeat(kept, numbers))
        counts = [number * k for number, k in zip(numbers, kept, strict=True)]
        return cls(tensors, counts, starts, np.repeat(BINS * np.arange(len(tensors)), counts), bucket)

    def write(self, ops: Ops, y: Array) -> Array:
        """Select and encode coordinates of the reordered tensors."""
        places = []
        for one, part, count in zip(self.chunks, ops.split(y, sizes(self.chunks)), self.counts, strict=True):
            rows = ops.reshape(part, (one.down * one.across, -1))
            places.append(ops.reshape(ops.top_indices(rows, count // int(rows.shape[0])), (-1,)))
        joined = ops.concat(places)
        values = ops.take(y, ops.constant(self.starts) + joined)
        books, codes = zip(*[quantise(ops, one) for one in ops.split(values, self.counts)], strict=True)
        low, high = ops.cast(joined % 256, "uint8"), ops.pack(ops.cast(joined // 256, "uint8"), 4)
        return ops.to_bytes(*books, low, high, ops.pack(ops.concat(codes), 2))

    def read(self, ops: Ops, data: Array, sender: str) -> Sent:
        """Decode what a rank sent."""
        n, books = sum(self.counts), (self.bucket.dtype, BINS * len(self.counts))
        packed = [("uint8", packed_size(n, bits)) for bits in (8, 4, 2)]
        values, low, high, codes = ops.from_bytes(data, books, *packed)
        places = ops.cast(low, "int64") + 256 * ops.cast(ops.unpack(high, 4, n), "int64")
        indices = check_indices(ops, ops.constant(self.starts) + places, self.bucket, sender)
        codes = ops.constant(self.firsts) + ops.cast(ops.unpack(codes, 2, n), "int64")
        return Sent(indices, codes, ops.reshape(values, (-1, BINS)))


def quantise(ops: Ops, values: Array) -> tuple[Array, Array]:
    """Return the mean of each of `BINS` bins, and the bin of each value: uint8."""
    n, wide = int(values.shape[0]), ops.cast(values, "float64")
    centred = wide - ops.sum(wide) / n
    scale = SIGMAS / BINS * ops.norms(ops.reshape(centred, (1, -1))) / math.sqrt(max(n - 1, 1))
    codes = ops.clip(ops.floor(centred / ops.where(scale > 0, scale, 1.0) + 0.5) + BINS // 2, 0, BINS - 1)
    members = ops.cast(ops.reshape(ops.arange(BINS), (-1, 1)) == ops.cast(codes, "int64"), "float64")
    numbers = ops.sum(members)
    means = ops.sum(members * wide) / ops.where(numbers > 0, numbers, 1.0)
    return ops.cast(means, ops.dtype(values)), ops.cast(codes, "uint8")


def clip_to_median(ops: Ops, norms: list[Array]) -> list[Array]:
    """Return what makes no norm larger than the median of all ranks; norms and factors are columns."""
    of_tensor = ops.reshape(ops.stack(norms), (-1, len(norms)))
    medians = [ops.kth_magnitude(of_tensor[t], len(norms) // 2 + 1) for t in range(int(of_tensor.shape[0]))]
    limit = ops.reshape(ops.concat([ops.reshape(one, (1,)) for one in medians]), (-1, 1))
    return [ops.where(norm > limit, limit / ops.where(norm > 0, norm, 1.0), 1.0) for norm in norms]
