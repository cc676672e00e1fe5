"""Reuse memory: the first write to new memory takes twice as long."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

_LEAST = 2**18
"""Smallest number of elements that is worth reusing."""

_ALIGNMENT = 16
"""Elements in 64 bytes: TensorFlow copies arrays that do not begin at a multiple of that."""

_FREE = 2
"""Reference count of an unused array: the list, and the argument of ``sys.getrefcount``."""


class BufferPool:
    """Pool of float32 arrays, each of which is reused once nothing refers to it any more.

    Args:
        most: Number of arrays that it keeps at most.
    """

    def __init__(self, most: int = 1) -> None:
        self._most = most
        self._kept: list[npt.NDArray[Any]] = []
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Let go of all arrays."""
        with self._lock:
            self._kept.clear()

    def take(self, n: int) -> npt.NDArray[Any]:
        """Return uninitialised memory for ``n`` float32, which begins at a multiple of 64 bytes unless it is small."""
        if n < _LEAST:
            return np.empty(n, np.float32)
        with self._lock:
            free = [i for i in range(len(self._kept)) if sys.getrefcount(self._kept[i]) <= _FREE]
            found = next((i for i in free if n <= self._kept[i].size - _ALIGNMENT <= n * 5 // 4), None)
            if found is None:
                if len(self._kept) == self._most:
                    del self._kept[free[0] if free else 0]
                self._kept.append(np.empty(n + _ALIGNMENT, np.float32))
                found = -1
            whole = self._kept[found]
            start = -whole.ctypes.data % (4 * _ALIGNMENT) // 4
            return whole[start : start + n]
