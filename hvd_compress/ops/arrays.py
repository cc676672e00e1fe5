"""Arrays and shapes, as all rooms name them."""

from __future__ import annotations

from typing import Any, TypeAlias

Array: TypeAlias = Any
"""An array of a framework: ``numpy.ndarray``, ``torch.Tensor`` or ``tf.Tensor``."""

Shape: TypeAlias = tuple[int, ...]
