"""Second moments of gradients, and gradients divided by their roots; see `hvd_compress.ops.moments`.

All matrices of a bucket are worked on at once, in square tiles: a launch takes longer than its work on most of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from hvd_compress.ops.kernels.cuda.launching import flat, kernel, launch, part, tiles, warps_for
from hvd_compress.ops.moments import EPSILON, LARGEST, Sides, size_of

_SIDE = 64
"""Rows and columns of a tile."""

_LONG = 1024
"""Coordinates of a vector, or rows of a matrix, that a program takes at once."""

_EPSILON, _LARGEST = tl.constexpr(EPSILON), tl.constexpr(LARGEST)


class _Tables(NamedTuple):
    """Where the programs find their work: a row of integers for each of them.

    Attributes:
        matrices: Place in the gradients, rows, columns, place in the moments, and places of the sums of tiles along
            rows and along columns.
        tiles: Matrix, first row, first column.
        lines: Matrix, first row or column, and whether these are columns.
        vectors: Place in the gradients, coordinates, and places of the moments and of their weight.
        sums: Number of all sums of tiles.
    """

    matrices: Tensor
    tiles: Tensor
    lines: Tensor
    vectors: Tensor
    sums: int


def precondition(x: Tensor, second: Tensor, sides: Sequence[Sides], beta2: float) -> tuple[Tensor, Tensor]:
    """Return quotients and new moments, as `Ops.precondition` does."""
    x, former = flat(x), flat(second)
    out, second = torch.empty_like(x), torch.empty_like(former)
    tables = _tables(tuple(sides), x.device)
    sums = x.new_empty(tables.sums, dtype=torch.float64)
    means = x.new_empty(len(tables.matrices), dtype=torch.float64)
    warps = warps_for(_SIDE * _SIDE)
    matrices = tables.matrices
    launch(_square_tiles, len(tables.tiles), x, matrices, tables.tiles, sums, warps=warps, SIDE=_SIDE)
    launch(_blend, len(tables.lines), former, second, matrices, tables.lines, sums, beta2, warps=1, SIDE=_SIDE)
    launch(_average, len(matrices), former, second, matrices, means, beta2, SIZE=_LONG)
    launch(_divide, len(tables.tiles), x, second, out, matrices, tables.tiles, means, warps=warps, SIDE=_SIDE)
    launch(_divide_vectors, len(tables.vectors), x, former, second, out, tables.vectors, beta2, SIZE=_LONG)
    return out, second


@lru_cache(maxsize=256)
def _tables(sides: tuple[Sides, ...], device: torch.device) -> _Tables:
    matrices: list[tuple[int, ...]] = []
    squares: list[tuple[int, ...]] = []
    lines: list[tuple[int, ...]] = []
    vectors: list[tuple[int, ...]] = []
    place = second = sums = 0
    for one in sides:
        rows, columns = one
        weight = second + size_of(one) - 1
        if columns == 1:
            starts = range(0, rows, _LONG)
            vectors += [(place + i, min(_LONG, rows - i), second + i, weight) for i in starts]
        else:
            matrix, along = len(matrices), sums + tiles(columns, _SIDE) * rows
            matrices.append((place, rows, columns, second, sums, along))
            ups, downs = range(0, rows, _SIDE), range(0, columns, _SIDE)
            squares += [(matrix, i, j) for i in ups for j in downs]
            lines += [(matrix, i, 0) for i in ups] + [(matrix, j, 1) for j in downs]
            sums = along + len(ups) * columns
        place, second = place + rows * columns, weight + 1
    table = partial(torch.tensor, dtype=torch.int64, device=device)
    return _Tables(table(matrices), table(squares), table(lines), table(vectors), sums)


@part
def _clipped(x: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)


@part
def _blended(former: tl.tensor, mean: tl.tensor, beta2: tl.tensor) -> tl.tensor:
    return former * beta2 + mean * (1 - beta2)


@kernel()
def _square_tiles(x: tl.tensor, matrices: tl.tensor, tiles: tl.tensor, sums: tl.tensor, SIDE: tl.constexpr) -> None:
    """Sum the squares of a tile, along rows and along columns."""
    tiles += tl.program_id(0).to(tl.int64) * 3
    matrices += tl.load(tiles) * 6
    rows, columns = tl.load(matrices + 1), tl.load(matrices + 2)
    up, left = tl.load(tiles + 1), tl.load(tiles + 2)
    i, j = up + tl.arange(0, SIDE), left + tl.arange(0, SIDE)
    ok = (i < rows)[:, None] & (j < columns)[None, :]
    value = _clipped(tl.load(x + tl.load(matrices) + i[:, None] * columns + j[None, :], mask=ok, other=0.0))
    squares = (value * value).to(tl.float64)
    tl.store(sums + tl.load(matrices + 4) + left // SIDE * rows + i, tl.sum(squares, 1), mask=i < rows)
    tl.store(sums + tl.load(matrices + 5) + up // SIDE * columns + j, tl.sum(squares, 0), mask=j < columns)


@kernel("beta2")
def _blend(
    former: tl.tensor,
    second: tl.tensor,
    matrices: tl.tensor,
    lines: tl.tensor,
    sums: tl.tensor,
    beta2: tl.tensor,
    SIDE: tl.constexpr,
) -> None:
    """Move the moments of some rows, or of some columns, towards the means of their squares."""
    lines += tl.program_id(0).to(tl.int64) * 3
    matrices += tl.load(lines) * 6
    across = tl.load(lines + 2)
    rows = tl.load(matrices + 1)
    number, length = tl.load(matrices + 1 + across), tl.load(matrices + 2 - across)
    line = tl.load(lines + 1) + tl.arange(0, SIDE)
    place = sums + tl.load(matrices + 4 + across) + line
    total = tl.zeros((SIDE,), tl.float64)
    for _ in range(tl.cdiv(length, SIDE)):
        total += tl.load(place, mask=line < number, other=0.0)
        place += number
    moment = tl.load(matrices + 3) + across * rows + line
    mean = (total / length.to(tl.float64)).to(tl.float32)
    blended = _blended(tl.load(former + moment, mask=line < number, other=0.0), mean, beta2)
    tl.store(second + moment, blended, mask=line < number)


@kernel("beta2")
def _average(
    former: tl.tensor, second: tl.tensor, matrices: tl.tensor, means: tl.tensor, beta2: tl.tensor, SIZE: tl.constexpr
) -> None:
    """Write the mean of a matrix's moments of rows, and the new weight of its moments."""
    matrix = tl.program_id(0).to(tl.int64)
    matrices += matrix * 6
    rows, columns, place = tl.load(matrices + 1), tl.load(matrices + 2), tl.load(matrices + 3)
    total = tl.zeros((SIZE,), tl.float64)
    for begin in range(0, rows, SIZE):
        i = begin + tl.arange(0, SIZE)
        total += tl.load(second + place + i, mask=i < rows, other=0.0).to(tl.float64)
    tl.store(means + matrix, tl.sum(total) / rows.to(tl.float64))
    weight = place + rows + columns
    tl.store(second + weight, _blended(tl.load(former + weight), 1.0, beta2))


@kernel()
def _divide(
    x: tl.tensor,
    second: tl.tensor,
    out: tl.tensor,
    matrices: tl.tensor,
    tiles: tl.tensor,
    means: tl.tensor,
    SIDE: tl.constexpr,
) -> None:
    """Divide a tile by the roots of its second moments."""
    tiles += tl.program_id(0).to(tl.int64) * 3
    matrix = tl.load(tiles)
    matrices += matrix * 6
    rows, columns = tl.load(matrices + 1), tl.load(matrices + 2)
    i, j = tl.load(tiles + 1) + tl.arange(0, SIDE), tl.load(tiles + 2) + tl.arange(0, SIDE)
    second += tl.load(matrices + 3)
    weight, mean = tl.load(second + rows + columns), tl.load(means + matrix).to(tl.float32)
    root = tl.sqrt_rn(tl.div_rn(tl.load(second + i, mask=i < rows, other=0.0), weight))
    factor = tl.load(second + rows + j, mask=j < columns, other=0.0)
    factor = tl.sqrt_rn(tl.div_rn(factor, tl.where(mean > 0, mean, 1.0)))
    index = tl.load(matrices) + i[:, None] * columns + j[None, :]
    ok = (i < rows)[:, None] & (j < columns)[None, :]
    value = _clipped(tl.load(x + index, mask=ok, other=0.0))
    tl.store(out + index, tl.div_rn(value, root[:, None] * factor[None, :] + _EPSILON), mask=ok)


@kernel("beta2")
def _divide_vectors(
    x: tl.tensor,
    former: tl.tensor,
    second: tl.tensor,
    out: tl.tensor,
    vectors: tl.tensor,
    beta2: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    """Do all for a part of a vector."""
    vectors += tl.program_id(0).to(tl.int64) * 4
    i = tl.arange(0, SIZE)
    ok = i < tl.load(vectors + 1)
    index, moment, last = tl.load(vectors) + i, tl.load(vectors + 2) + i, tl.load(vectors + 3)
    value = _clipped(tl.load(x + index, mask=ok, other=0.0))
    weight = _blended(tl.load(former + last), 1.0, beta2)
    blended = _blended(tl.load(former + moment, mask=ok, other=0.0), value * value, beta2)
    tl.store(second + moment, blended, mask=ok)
    tl.store(second + last, weight)  # all parts write the same
    tl.store(out + index, tl.div_rn(value, tl.sqrt_rn(tl.div_rn(blended, weight)) + _EPSILON), mask=ok)
