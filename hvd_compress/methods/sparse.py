"""What the methods have in common in which each rank sends coordinates of its own choice."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllGather, Array, Chosen, Exchange, Exchanging, State, World
from hvd_compress.core.totals import Scattered, Total
from hvd_compress.methods.base import Method, check_range
from hvd_compress.ops import DAMAGED, Ops

HALF_MAX = 65504.0
"""Largest finite float16."""

PAGE = 2**16
"""Coordinates whose place within their page fits 16 bits."""


@dataclass(frozen=True, kw_only=True)
class Sparse(Method):
    """Values and indices, exchanged by allgather.

    With p_i the gradient of rank i plus its residual and S_i the indices that it selects::

        total = sum_i sum_{j in S_i} p_i[j] e_j          e_i = p_i - p_i restricted to S_i

    An index takes 16 bits: indices travel in ascending order, as their place within a page of 65536 coordinates, and
    where there are several pages, 32 bits for each page say how many indices it has.

    Args:
        values: ``"fp32"`` sends values in the bucket's own precision, ``"fp16"`` in 16 bits, limited to +-65504; what
            rounding and limit take away stays in the residual.
    """

    family = "sparse"
    collective = "allgather"
    feedback = True
    retains = True
    ragged: ClassVar[bool] = True
    """Whether ranks differ in how many coordinates they send; 32 bits say how many, then."""

    values: str = "fp32"

    def __post_init__(self) -> None:
        check_range("values", self.values, "'fp32' or 'fp16'", self.values in ("fp32", "fp16"))

    @abstractmethod
    def select(self, ops: Ops, bucket: Bucket, x: Array, state: State) -> tuple[Array, State]:
        """Choose what to send: ascending indices, and the next state."""

    def combine(self, ops: Ops, bucket: Bucket, pieces: list[tuple[Array, Array]]) -> Total:
        """Add up the indices and values of all ranks.

        One rank after another: within one the indices differ, so the order of the additions is fixed.
        """
        del ops
        return Scattered(pieces, bucket.numel, bucket.dtype)

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, keep: bool = False
    ) -> Exchanging:
        indices, state = self.select(ops, bucket, x, state)
        values = ops.take(x, indices)
        if self.values == "fp16":
            values = ops.cast(ops.clip(values, -HALF_MAX, HALF_MAX), "float16")
        wire = _Wire(-(-bucket.numel // PAGE), ops.dtype(values))
        parts = wire.write(ops, indices, values)
        if self.ragged:
            parts.insert(0, ops.reshape(ops.cast(ops.size(indices), "int32"), (1,)))
        everyone = yield AllGather(ops.to_bytes(*parts), ragged=self.ragged)

        if self.ragged:
            pieces = list(wire.read_ragged(ops, everyone, world.size))
        else:
            pieces = [wire.read(ops, everyone[rank], int(values.shape[0])) for rank in range(world.size)]
        senders = (f"rank {rank}" for rank in range(world.size))
        pieces = [(within(ops, i, bucket, who), v) for (i, v), who in zip(pieces, senders, strict=True)]
        total = self.combine(ops, bucket, pieces)
        left = None
        if keep:
            counted = ops.cast(self.counted(ops, total, indices, values), bucket.dtype)
            left = ops.put(x, indices, ops.take(x, indices) - counted)
        return Exchange(total, state, left, Chosen(indices))

    def counted(self, ops: Ops, total: Total, indices: Array, values: Array) -> Array:
        """Return what of the values of this rank is in the sum."""
        del ops, total, indices
        return values


def within(ops: Ops, indices: Array, bucket: Bucket, sender: str) -> Array:
    """Indices from the wire, once it is sure that they ascend and are those of coordinates of the bucket."""
    message = f"{sender} sent indices that do not ascend within 0 .. {bucket.numel - 1} of bucket {bucket.key!r}"
    return ops.check(indices, ops.ascending(indices, bucket.numel), f"{message}; {DAMAGED}")


class _Wire(NamedTuple):
    """How indices and values lie in bytes.

    Attributes:
        pages: How many pages the bucket has.
        values: Dtype of the values.
    """

    pages: int
    values: str

    def write(self, ops: Ops, indices: Array, values: Array) -> list[Array]:
        """The arrays that are sent, one after another."""
        counts = [ops.histogram(indices // PAGE, self.pages)] if self.pages > 1 else []
        return [*counts, values, ops.cast(indices % PAGE, "uint16")]

    def read(self, ops: Ops, data: Array, n: Any) -> tuple[Array, Array]:
        """Indices and values of one rank that sent ``n`` of them."""
        counts = [("int32", self.pages)] if self.pages > 1 else []
        *pages, values, places = ops.from_bytes(data, *counts, (self.values, n), ("uint16", n))
        indices = ops.cast(places, "int64")
        if pages:
            counts = ops.cast(pages[0], "int64")
            message = f"a payload has counts that do not make up its number of indices; {DAMAGED}"
            counts = ops.check(counts, (counts >= 0) & (ops.sum(counts) == n), message)
            indices = indices + ops.repeat(ops.arange(self.pages) * PAGE, counts)
        return indices, values

    def read_ragged(self, ops: Ops, data: Array, size: int) -> Iterator[tuple[Array, Array]]:
        """Indices and values of all ranks, each with its count in front."""
        width = np.dtype(self.values).itemsize + 2
        for left in reversed(range(size)):
            n = ops.length(ops.from_bytes(data[:4], ("int32", 1))[0])
            n = ops.check(n, n >= 0, f"a payload says that it has a negative number of indices; {DAMAGED}")
            end = 4 + n * width + (4 * self.pages if self.pages > 1 else 0)
            yield self.read(ops, data[4:end] if left else data[4:], n)  # the last is to have all that there is
            data = data[end:]
