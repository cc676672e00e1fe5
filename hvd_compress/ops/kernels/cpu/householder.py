"""Orthonormal columns, by Householder reflections in a fixed order.

LAPACK's depend on the number of threads, and ranks that differ in it would drift apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from hvd_compress.ops.kernels.cpu.compiled import NOTHING, filled, loop, part, total

Floats = npt.NDArray[np.float32]


def orthogonalise(x: Floats) -> Floats:
    """Return orthonormal columns that span those of ``x``, shape (n, r) with r <= n, as `Ops.orthogonalise` does."""
    columns = np.array(x.T, order="C")
    q = np.eye(x.shape[1], x.shape[0], dtype=np.float32)
    _reflect(columns, q)
    return np.ascontiguousarray(q.T)


@total
def _product(x: Any, y: Any) -> Any:
    product: Any = 0.0
    for i in range(x.size):
        product += np.float64(x[i]) * np.float64(y[i])
    return product


@part
def _reflected(v: Any, factor: Any, column: Any) -> None:
    """Reflect a column by ``1 - factor v v^T``; the first element of ``v`` counts as 1."""
    share = factor * (column[0] + _product(v[1:], column[1:]))
    column[0] -= np.float32(share)
    for i in range(1, column.size):
        column[i] -= np.float32(share * v[i])


@loop(NOTHING, filled(types.float32, 2), filled(types.float32, 2))
def _reflect(columns: Any, q: Any) -> None:
    """Turn the rows of ``q``, those of an identity matrix, into the orthonormal columns; overwrites ``columns``."""
    rank = columns.shape[0]
    factors = np.zeros(rank)
    for j in range(rank):
        v = columns[j, j:]
        first, rest = np.float64(v[0]), _product(v[1:], v[1:])
        if rest == 0:
            continue
        norm = np.sqrt(first * first + rest)
        pivot = first + (norm if first >= 0 else -norm)
        factors[j] = np.abs(pivot) / norm
        for i in range(1, v.size):
            v[i] = np.float32(v[i] / pivot)
        for k in range(j + 1, rank):
            _reflected(v, factors[j], columns[k, j:])
    for j in range(rank - 1, -1, -1):
        for k in range(j, rank):
            _reflected(columns[j, j:], factors[j], q[k, j:])
