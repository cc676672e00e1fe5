"""Read the loss scale, so that residuals stay in unscaled units."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hvd_compress.errors import SpecError


class LossScale:
    """Scale of the gradients; 1 without a loss scaler."""

    def __init__(self) -> None:
        self._ask: Callable[[], Any] = lambda: 1.0

    def follow(self, scaler: Any) -> None:
        """Read the scale from a loss scaler: an object with ``get_scale()``, or a function that returns the scale.

        Raises:
            SpecError: If it is neither.
        """
        ask = getattr(scaler, "get_scale", scaler)
        if isinstance(scaler, type) or not callable(ask):
            raise SpecError(
                f"compression.follow({scaler!r}) is not supported: pass a loss scaler with get_scale(), such as a"
                " torch.amp.GradScaler, or a function without arguments that returns the scale"
            )
        self._ask = ask

    def read(self) -> float:
        """Return the current scale.

        Raises:
            SpecError: If it is not a positive number.
        """
        scale = float(self._ask())
        if not 0 < scale < math.inf:
            raise SpecError(
                f"the loss scale is {scale:g}, but must be a positive number: correct the object that"
                " compression.follow was given"
            )
        return scale
