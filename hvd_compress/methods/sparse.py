"""Base class of methods in which each rank selects the coordinates that it sends."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllGather, Exchange, Exchanging, SentIndices, State, World
from hvd_compress.core.method import Card, Method, check_range
from hvd_compress.ops import DAMAGED, Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.totals import EncodedSum, SparseSum

HALF_MAX = 65504.0
"""Largest finite float16."""

PAGE = 2**16
"""Coordinates per page, so that the position within a page fits 16 bits."""


@dataclass(frozen=True, kw_only=True)
class Sparse(Method):
    """Exchange values and indices by allgather.

    With p_i the gradient of rank i plus its residual, and S_i the indices that it selects::

        total = sum_i sum_{j in S_i} p_i[j] e_j          e_i = p_i - p_i restricted to S_i

    An index takes 16 bits: the ascending indices are sent as positions within pages of 65536 coordinates. With several
    pages, 32 bits per page hold the number of its indices.

    Args:
        values: ``"fp32"`` sends values in the bucket's dtype, ``"fp16"`` in 16 bits, clipped to +-65504. The residual
            keeps the rounding and clipping error.
    """

    family = "sparse"
    card = Card(
        collective="allgather",
    )
    feedback = True
    lags = True
    retains = True
    ragged: ClassVar[bool] = True
    """Whether ranks send different numbers of coordinates; the number then takes 32 bits of the payload."""

    values: str = "fp32"

    def __post_init__(self) -> None:
        check_range("values", self.values, "'fp32' or 'fp16'", self.values in ("fp32", "fp16"))

    @abstractmethod
    def select(self, ops: Ops, bucket: Bucket, x: Array, state: State) -> tuple[Array, State]:
        """Return the ascending indices of the coordinates to send, and the next state."""

    def combine(self, ops: Ops, bucket: Bucket, pieces: list[tuple[Array, Array]]) -> EncodedSum:
        """Sum the indices and values of all ranks.

        Ranks are added one after another. Within a rank indices are unique, so the order of additions is fixed.
        """
        del ops
        return SparseSum(pieces, bucket.numel, bucket.dtype)

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, return_error: bool = False
    ) -> Exchanging:
        indices, state = self.select(ops, bucket, x, state)
        values = ops.take(x, indices)
        if self.values == "fp16":
            values = ops.cast(ops.clip(values, -HALF_MAX, HALF_MAX), "float16")
        wire = sparse_layout(bucket, ops.dtype(values))
        parts = ragged(ops, wire, indices, values) if self.ragged else wire.write(ops, indices, values)
        everyone = yield AllGather(ops.to_bytes(*parts), ragged=self.ragged)

        if self.ragged:
            pieces = list(read_ragged(ops, everyone, [wire] * world.size))
        else:
            pieces = [wire.read(ops, everyone[rank], int(values.shape[0])) for rank in range(world.size)]
        senders = (f"rank {rank}" for rank in range(world.size))
        pieces = [(check_indices(ops, i, bucket, who), v) for (i, v), who in zip(pieces, senders, strict=True)]
        total = self.combine(ops, bucket, pieces)
        error = None
        if return_error:
            counted = ops.cast(self.counted(ops, total, indices, values), bucket.dtype)
            error = ops.put(x, indices, ops.take(x, indices) - counted)
        return Exchange(total, state, error, SentIndices(indices))

    def counted(self, ops: Ops, total: EncodedSum, indices: Array, values: Array) -> Array:
        """Return the part of this rank's values that the sum includes."""
        del ops, total, indices
        return values


def check_indices(ops: Ops, indices: Array, bucket: Bucket, sender: str) -> Array:
    """Return received indices after checking that they ascend and are within the bucket."""
    message = f"{sender} sent indices that do not ascend within 0 .. {bucket.numel - 1} of bucket {bucket.key!r}"
    return ops.check(indices, ops.ascending(indices, bucket.numel), f"{message}; {DAMAGED}")


class SparseLayout(NamedTuple):
    """Byte layout of indices and values.

    Attributes:
        pages: Number of pages of the bucket.
        values: Dtype of the values.
    """

    pages: int
    values: str

    def write(self, ops: Ops, indices: Array, values: Array) -> list[Array]:
        """Return the arrays to send, in order."""
        counts = [ops.histogram(indices // PAGE, self.pages)] if self.pages > 1 else []
        return [*counts, values, ops.cast(indices % PAGE, "uint16")]

    def read(self, ops: Ops, data: Array, n: Any) -> tuple[Array, Array]:
        """Return the indices and values of a rank that sent ``n`` of them."""
        counts = [("int32", self.pages)] if self.pages > 1 else []
        *pages, values, places = ops.from_bytes(data, *counts, (self.values, n), ("uint16", n))
        indices = ops.cast(places, "int64")
        if pages:
            counts = ops.cast(pages[0], "int64")
            message = f"a payload has counts that do not make up its number of indices; {DAMAGED}"
            counts = ops.check(counts, (counts >= 0) & (ops.sum(counts) == n), message)
            indices = indices + ops.repeat(ops.arange(self.pages) * PAGE, counts)
        return indices, values


def sparse_layout(bucket: Bucket, values: str) -> SparseLayout:
    """Return the layout of indices of a bucket and their values."""
    return SparseLayout(-(-bucket.numel // PAGE), values)


def ragged(ops: Ops, wire: SparseLayout, indices: Array, values: Array) -> list[Array]:
    """Return the arrays to send, with the number of indices first."""
    return [ops.constant(np.array([indices.shape[0]], np.int32)), *wire.write(ops, indices, values)]


def read_ragged(ops: Ops, data: Array, wires: Sequence[SparseLayout]) -> Iterator[tuple[Array, Array]]:
    """Yield indices and values, given the concatenation of what `ragged` returned for each of them."""
    for number, wire in enumerate(wires, start=1):
        width = np.dtype(wire.values).itemsize + 2
        n = int(ops.from_bytes(data[:4], ("int32", 1))[0][0])
        n = ops.check(n, n >= 0, f"a payload says that it has a negative number of indices; {DAMAGED}")
        end = 4 + n * width + (4 * wire.pages if wire.pages > 1 else 0)
        last = number == len(wires)
        yield wire.read(ops, data[4:] if last else data[4:end], n)  # the last one must have exactly the rest
        data = data[end:]
