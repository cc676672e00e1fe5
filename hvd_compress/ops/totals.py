"""Encoded sums, which are decoded where and when they are needed, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from hvd_compress.ops import Ops, wrong_length
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.code import Code


class SparseSum(NamedTuple):
    """Sparse sum.

    Attributes:
        pieces: Ascending indices with their values; pieces are added in order.
        size: Number of coordinates of the sum.
        dtype: Dtype of the sum.
    """

    pieces: Sequence[tuple[Array, Array]]
    size: int
    dtype: str


class QuantizedSum(NamedTuple):
    """Sum or concatenation of quantised payloads; see `Ops.dequantise`.

    Attributes:
        rows: uint8, one payload per row.
        code: The code of the payloads.
        n: Coordinates per payload.
        join: Whether to concatenate the payloads instead of adding them.
        size: Number of coordinates of the result; further ones are padding.
        dtype: Dtype of the result.
    """

    rows: Array
    code: Code
    n: int
    join: bool
    size: int
    dtype: str


class LowRankSum(NamedTuple):
    """Concatenation of the flat matrices ``left @ right.T``.

    Attributes:
        lefts: Shapes (rows, rank).
        rights: Shapes (columns, rank).
    """

    lefts: Sequence[Array]
    rights: Sequence[Array]


EncodedSum: TypeAlias = Array | SparseSum | QuantizedSum | LowRankSum
"""A dense or an encoded sum."""


def quantized_sum(ops: Ops, rows: Array, code: Code, n: int, size: int, dtype: str, join: bool = False) -> QuantizedSum:
    """Make a `QuantizedSum` after checking the length of its rows, before decoding would fail.

    Raises:
        ExchangeError: As in `Ops.check`, if the length is wrong.
    """
    found, expected = int(rows.shape[1]), code.size(n, dtype)
    return QuantizedSum(ops.check(rows, found == expected, wrong_length(found, expected)), code, n, join, size, dtype)


def dense(ops: Ops, total: EncodedSum) -> Array:
    """Decode a sum."""
    if isinstance(total, SparseSum):
        return ops.scatter_sum(total.size, total.dtype, list(total.pieces))
    if isinstance(total, QuantizedSum):
        return ops.dequantise(total.rows, total.code, total.n, total.dtype, total.join)[: total.size]
    if isinstance(total, LowRankSum):
        return ops.products(total.lefts, total.rights)
    return total


def sum_rows(ops: Ops, rows: Array, size: int) -> Array:
    """Sum the ``size`` rows of an array, in order."""
    total = rows[0]
    for row in range(1, size):
        total = ops.add(total, rows[row])
    return total
