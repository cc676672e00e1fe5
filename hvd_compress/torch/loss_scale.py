"""By what has the loss been multiplied? Residuals are kept in true units, so a loss scaler has to say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hvd_compress.errors import SpecError


class LossScale:
    """The factor by which gradients are too large; 1 as long as it follows no loss scaler."""

    def __init__(self) -> None:
        self._ask: Callable[[], Any] = lambda: 1.0

    def follow(self, scaler: Any) -> None:
        """Ask a loss scaler from now on: an object with ``get_scale()``, or a function that gives the scale.

        Raises:
            SpecError: If it is something else.
        """
        ask = getattr(scaler, "get_scale", scaler)
        if isinstance(scaler, type) or not callable(ask):
            raise SpecError(
                f"compression.follow({scaler!r}) is not possible: give a loss scaler with get_scale(), such as a"
                " torch.amp.GradScaler, or a function without arguments that gives the scale"
            )
        self._ask = ask

    def read(self) -> float:
        """The present scale.

        Raises:
            SpecError: If it is not a positive number.
        """
        scale = float(self._ask())
        if not 0 < scale < math.inf:
            raise SpecError(f"the loss scale is {scale:g}; it must be a positive number")
        return scale
