"""Additions at indices."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import types

from hvd_compress.ops.kernels.cpu.compiled import FLOATS, FLOATS_OUT, INDICES, INT, loop

Floats: TypeAlias = npt.NDArray[np.float32]
Indices: TypeAlias = npt.NDArray[np.int64]


def add_at(total: Floats, indices: Indices, values: Floats) -> Floats:
    """Add values at indices, in place; of indices that occur several times, each counts.

    Raises:
        IndexError: If an index is out of range; what comes before it is added.
    """
    if not _add_at(total, indices, values):
        raise IndexError(f"an index is not in 0 .. {total.size - 1}")
    return total


def ascending(indices: Indices, n: int) -> bool:
    """Return whether indices ascend strictly within ``0 .. n-1``."""
    return bool(_ascending(indices, n))


@loop(types.boolean, FLOATS_OUT, INDICES, FLOATS)
def _add_at(total: Any, indices: Any, values: Any) -> Any:
    for i in range(indices.size):
        place = indices[i]
        if place < 0 or place >= total.size:
            return False
        total[place] += values[i]
    return True


@loop(types.boolean, INDICES, INT)
def _ascending(indices: Any, n: Any) -> Any:
    wrong = np.int64(0)
    for i in range(indices.size - 1):
        wrong |= np.int64(indices[i + 1] <= indices[i])
    return wrong == 0 and (indices.size == 0 or (indices[0] >= 0 and indices[indices.size - 1] < n))
