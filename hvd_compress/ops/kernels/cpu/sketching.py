"""`Ops.rehearse_sketch`, `Ops.write_sketch` and `Ops.read_sketch` of numpy arrays, whatever they are made on."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_compress.ops import mix_seed
from hvd_compress.ops.kernels.cpu.sketch import Indices, crowd, found, peel, places, read, write
from hvd_compress.ops.sketch import CROWD, HASHES, Sketch

Arr: TypeAlias = npt.NDArray[Any]


def rehearse_sketch(sketch: Sketch, union: Arr, keys: Arr) -> int:
    """The first of several hash keys by which a bitmap of coordinates can be peeled; -1 if there is none."""
    indices = found(union, sketch.capacity)
    if indices.size <= sketch.capacity:
        for key in keys.tolist():
            cells = _places(sketch, indices, key)
            if crowd(cells, sketch.cells) <= 2**CROWD and peel(cells, sketch.cells)[0].size == indices.size:
                return int(key)
    return -1


def write_sketch(sketch: Sketch, union: Arr, key: Arr, peak: Arr, x: Arr) -> Arr:
    """The sketch of an array whose largest magnitude on any rank is ``peak``."""
    indices = found(union, sketch.capacity)
    return write(_places(sketch, indices, int(key[0])), sketch.integers(x[indices], peak), sketch.cells)


def read_sketch(sketch: Sketch, union: Arr, key: Arr, peak: Arr, sums: Arr) -> Arr:
    """Undo `write_sketch`, also of a sum of sketches."""
    indices = found(union, sketch.capacity)
    cells = _places(sketch, indices, int(key[0]))
    x = np.zeros(union.size, sketch.dtype)
    x[indices] = sketch.floats(read(cells, *peel(cells, sketch.cells), sums), peak)
    return x


def _places(sketch: Sketch, indices: Indices, key: int) -> Indices:
    return places(indices, [mix_seed(key, number) for number in range(HASHES)], sketch.table)
