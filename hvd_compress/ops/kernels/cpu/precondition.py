"""Second moments of gradients, and gradients divided by their roots; see `hvd_compress.ops.moments`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_compress.ops.kernels.cpu.compiled import FLOAT, FLOATS, FLOATS_OUT, INT, NOTHING, loop, part, total
from hvd_compress.ops.moments import EPSILON, LARGEST, Sides, size_of

Floats: TypeAlias = npt.NDArray[np.float32]

_EPSILON, _LARGEST = np.float32(EPSILON), np.float32(LARGEST)


def precondition(x: Floats, second: Floats, sides: Sequence[Sides], beta2: float, out: Floats) -> tuple[Floats, Floats]:
    """Return quotients, written to ``out``, and new moments, as `Ops.precondition` does; ``out`` may be ``x``."""
    moments, start, begin = np.empty_like(second), 0, 0
    for one in sides:
        end, stop = start + one.rows * one.columns, begin + size_of(one)
        _precondition(
            x[start:end],
            second[begin:stop],
            one.rows,
            one.columns,
            np.float32(beta2),
            moments[begin:stop],
            out[start:end],
        )
        start, begin = end, stop
    return out, moments


@part
def _clipped(x: Any) -> Any:
    return min(max(x, -_LARGEST), _LARGEST)


@total
def _squares(row: Any, columns: Any) -> Any:
    """The sum of the squares of a row, whose squares are added to those of the columns."""
    found: Any = 0.0
    for j in range(row.size):
        square = _clipped(row[j]) * _clipped(row[j])
        columns[j] += np.float64(square)
        found += np.float64(square)
    return found


@part
def _blended(former: Any, mean: Any, beta2: Any) -> Any:
    return former * beta2 + np.float32(mean) * (np.float32(1) - beta2)


@loop(NOTHING, FLOATS, FLOATS, INT, INT, FLOAT, FLOATS_OUT, FLOATS_OUT)
def _precondition(x: Any, former: Any, rows: Any, columns: Any, beta2: Any, second: Any, out: Any) -> None:
    weight = _blended(former[former.size - 1], 1.0, beta2)
    second[former.size - 1] = weight
    if columns == 1:
        for i in range(rows):
            one = _clipped(x[i])
            second[i] = _blended(former[i], one * one, beta2)
            out[i] = one / (np.sqrt(second[i] / weight) + _EPSILON)
        return
    squares = np.zeros(columns, np.float64)
    mean: Any = 0.0
    for i in range(rows):
        second[i] = _blended(former[i], _squares(x[i * columns : (i + 1) * columns], squares) / columns, beta2)
        mean += np.float64(second[i]) / rows
    roots = np.empty(columns, np.float32)
    for j in range(columns):
        second[rows + j] = _blended(former[rows + j], squares[j] / rows, beta2)
        roots[j] = np.sqrt(np.float64(second[rows + j]) / mean) if mean > 0 else 0
    for i in range(rows):
        root = np.float32(np.sqrt(second[i] / weight))
        row, quotients = x[i * columns : (i + 1) * columns], out[i * columns : (i + 1) * columns]
        for j in range(columns):
            quotients[j] = _clipped(row[j]) / (root * roots[j] + _EPSILON)
