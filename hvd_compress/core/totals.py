"""Sums that are not written out yet: what it takes to decode them, where they are wanted and a part at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from hvd_compress.core.collectives import Array
from hvd_compress.ops import Ops, wrong_length
from hvd_compress.ops.code import Code


class Scattered(NamedTuple):
    """A sum that is zero at most coordinates.

    Attributes:
        pieces: Indices, which ascend, and values; they are added up one after another.
        size: Coordinates of the sum.
        dtype: Of the sum.
    """

    pieces: Sequence[tuple[Array, Array]]
    size: int
    dtype: str


class Coded(NamedTuple):
    """The sum of what some codes stand for, or their concatenation; see `Ops.dequantise`.

    Attributes:
        rows: uint8, one payload in each.
        code: How they were compressed.
        n: Coordinates of each.
        join: Whether they are put one after another.
        size: Coordinates of the whole; what is beyond is left out.
        dtype: Of the sum.
    """

    rows: Array
    code: Code
    n: int
    join: bool
    size: int
    dtype: str


class Products(NamedTuple):
    """Matrices one after another, flat: each is ``left @ right.T``.

    Attributes:
        lefts: Shapes (rows, rank).
        rights: Shapes (columns, rank).
    """

    lefts: Sequence[Array]
    rights: Sequence[Array]


Total: TypeAlias = Array | Scattered | Coded | Products
"""A sum, written out or not."""


def coded(ops: Ops, rows: Array, code: Code, n: int, size: int, dtype: str, join: bool = False) -> Coded:
    """Check that rows are as long as they should be, which decoding would find too late.

    Raises:
        ExchangeError: As in `Ops.check`, if they are not.
    """
    found, expected = int(rows.shape[1]), code.size(n, dtype)
    return Coded(ops.check(rows, found == expected, wrong_length(found, expected)), code, n, join, size, dtype)


def dense(ops: Ops, total: Total) -> Array:
    """Write a sum out."""
    if isinstance(total, Scattered):
        return ops.scatter_sum(total.size, total.dtype, list(total.pieces))
    if isinstance(total, Coded):
        return ops.dequantise(total.rows, total.code, total.n, total.dtype, total.join)[: total.size]
    if isinstance(total, Products):
        return ops.products(total.lefts, total.rights)
    return total
