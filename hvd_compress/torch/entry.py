"""A gradient of a step: what is known of it, from its arrival until its result is there."""

from __future__ import annotations

import math
from enum import IntEnum

from torch import Tensor

from hvd_compress.torch.bucket_state import Place


class GradientArrival(IntEnum):
    """When the gradient of a parameter arrived in the first step, on the rank where it arrived first."""

    NEVER = 0
    """Horovod reduces it itself, as it is sparse."""
    LATE = 1
    """After the backward pass, as the parameter was not used."""
    IN_BACKWARD = 2


class Entry:
    """Gradient of a step.

    Args:
        number: Index in order of arrival, from 0.
        grad: The gradient.
        parameter: Its parameter; None in a direct call.
        used: Whether this rank has used the parameter.

    Attributes:
        arrival: When it arrived, if gradients were held then.
        place: Its place, once it is exchanged; None if it is not.
        nonfinite: Whether it is not finite on some rank.
        used_anywhere: Whether some rank has used the parameter.
        dropped: Whether its step was aborted.
    """

    __slots__ = (
        "_own",
        "_version",
        "arrival",
        "dropped",
        "grad",
        "nonfinite",
        "number",
        "parameter",
        "place",
        "used",
        "used_anywhere",
    )

    def __init__(self, number: int, grad: Tensor, parameter: Tensor | None, used: bool) -> None:
        self.number = number
        self.grad = grad
        self.parameter = parameter
        self.used = used
        self.used_anywhere = True
        self.place: Place | None = None
        self.nonfinite = self.dropped = False
        self.arrival = GradientArrival.IN_BACKWARD
        self._own = parameter is not None and parameter.grad is grad
        self._version = grad._version

    @property
    def frozen(self) -> bool:
        """True if its parameter has ``requires_grad=False``: the result is zero then."""
        return self.parameter is not None and not self.parameter.requires_grad

    @property
    def changed(self) -> bool:
        """True if user code has modified the gradient in place or replaced ``parameter.grad`` since it arrived."""
        if self._version != self.grad._version:
            return True
        return self._own and self.parameter is not None and self.parameter.grad is not self.grad

    def note_result(self) -> None:
        """Note that the gradient has been replaced by its result, which is no change."""
        self._version = self.grad._version

    def overrule(self) -> None:
        """Overwrite the result where it does not count: with nan if it is not finite, with zeros if it is frozen."""
        if self.place is None:
            return
        if self.nonfinite:
            self.grad.fill_(math.nan)
        if self.frozen:
            self.grad.zero_()
