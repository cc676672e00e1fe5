"""Reuse memory: the first write to new memory takes twice as long."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

_LEAST = 2**18
"""Smallest number of elements that is worth reusing."""

_FREE = 2
"""Reference count of an unused array: the attribute, and the argument of ``sys.getrefcount``."""


class BufferPool:
    """Pool of one float32 array, which is reused once nothing refers to it any more."""

    def __init__(self) -> None:
        self._kept: npt.NDArray[Any] = np.empty(0, np.float32)
        self._lock = threading.Lock()

    def take(self, n: int) -> npt.NDArray[Any]:
        """Return uninitialised memory for ``n`` float32."""
        if n < _LEAST:
            return np.empty(n, np.float32)
        with self._lock:
            fits = n <= self._kept.size <= n * 5 // 4
            if not fits or sys.getrefcount(self._kept) > _FREE:
                self._kept = np.empty(n, np.float32)
            return self._kept[:n]
