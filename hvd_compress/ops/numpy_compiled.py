"""Primitives in numpy, with CPU kernels for the hot ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvd_compress.ops.buffer_pool import BufferPool
from hvd_compress.ops.cpu_kernels import SPARE, Arr, CpuKernelOps
from hvd_compress.ops.numpy import NumpyOps


class NumpyCompiledOps(CpuKernelOps, NumpyOps):
    """Primitives in numpy with CPU kernels. See `hvd_compress.ops.Ops`.

    Args:
        pool: Memory for large results.
    """

    def __init__(self, pool: BufferPool = SPARE) -> None:
        self._pool = pool

    def room(self, n: int) -> Arr:
        return self._pool.take(n)

    def call(self, function: Callable[..., Sequence[Arr]], *arrays: Any) -> list[Arr]:
        given = [np.ascontiguousarray(a) if isinstance(a, np.ndarray) and a.ndim else a for a in arrays]
        return [np.asarray(found) for found in function(*given)]

    def add(self, x: Arr, y: Arr) -> Arr:
        return np.add(x, y, out=x) if x.dtype == y.dtype and x.flags.writeable else x + y

    def scale(self, x: Arr, factor: float) -> Arr:
        return np.multiply(x, factor, out=x) if x.flags.writeable else x * factor

    def subtract(self, x: Arr, y: Arr) -> Arr:
        return np.subtract(x, y, out=x) if x.flags.writeable else x - y
