"""Random numbers from indices, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.ops import MIX, second_key

Arr = npt.NDArray[Any]


def hash_indices(seed: int, indices: Arr) -> npt.NDArray[np.uint32]:
    """Return the random 32-bit hashes of indices below 2**32."""
    x = indices.astype(np.uint32) ^ np.uint32(seed)
    x ^= x >> np.uint32(16)
    x *= np.uint32(MIX[0])
    x ^= x >> np.uint32(15)
    x += np.uint32(second_key(seed))
    x *= np.uint32(MIX[1])
    x ^= x >> np.uint32(16)
    return x
