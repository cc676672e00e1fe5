"""Memory that is used again: to touch that which is new to the process takes as long as to write it twice."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

_LEAST = 2**18
"""Numbers from which on it matters."""

_FREE = 2
"""References to an array that nobody uses: the one that is kept, and the one by which it is asked."""


class Spare:
    """Keeps the float32 array that was given out last, and gives it out again once nobody refers to it any more."""

    def __init__(self) -> None:
        self._kept: npt.NDArray[Any] = np.empty(0, np.float32)
        self._lock = threading.Lock()

    def take(self, n: int) -> npt.NDArray[Any]:
        """Memory for ``n`` float32, whatever is in it."""
        if n < _LEAST:
            return np.empty(n, np.float32)
        with self._lock:
            fits = n <= self._kept.size <= n * 5 // 4
            if not fits or sys.getrefcount(self._kept) > _FREE:
                self._kept = np.empty(n, np.float32)
            return self._kept[:n]
