"""Agreement of the ranks of a process group on each step, by a small collective at its beginning and one at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from hvd_compress.core.collectives import AllReduce, Collective
from hvd_compress.torch.reducer import MakeVerdict
from hvd_compress.transport.protocol import Handle, Transport

_NOTHING = torch.empty(0, device="cpu")

_UNUSED, _USED, _BAD = 0, 1, 2
"""Contributions to the verdict on a gradient; the largest one of all ranks counts."""


def wishes(asking: bool, undoing: bool) -> Tensor:
    """Return what a rank tells as a step begins; the sum shows whether any rank asks, and whether all undo."""
    return torch.tensor([asking, not undoing], dtype=torch.int32, device="cpu")


def factor_of(op: str, size: int) -> float:
    """Return the factor of sums over the ranks for ``"sum"`` or ``"mean"``."""
    return 1.0 if op == "sum" else 1.0 / size


def verdict_maker(transport: Transport, factor: float, count: Callable[[Collective], None]) -> MakeVerdict:
    """Return a function that creates the `GroupVerdict` on a step; it holds no reference to a model."""
    return lambda world, asking, undoing: GroupVerdict(transport, factor, asking, undoing, count)


class GroupVerdict:
    """Verdict on one step.

    As it begins, ranks tell whether they want to verify that all agree, and whether they want to undo the last step.
    Then no payload is started before all of them know, so that collectives are in the same order on all ranks. As it
    ends, they tell which gradients are not finite and which parameters they have used.

    Args:
        transport: Performs the collectives.
        scale: Factor of sums over the ranks.
        asking: This rank wants to verify that all ranks agree.
        undoing: This rank wants to undo the last step.
        count: Called with each message.

    Attributes:
        nbytes: Zero: a gradient has no placeholder on the wire.
    """

    nbytes = 0

    def __init__(
        self,
        transport: Transport,
        scale: float,
        asking: bool,
        undoing: bool,
        count: Callable[[Collective], None],
    ) -> None:
        self._transport = transport
        self._scale = scale
        self._count = count
        self._peaks: list[float | Tensor] = []
        self._used: list[bool] = []
        self._asked = self._start(wishes(asking, undoing), "sum")
        self._heard: Handle | None = None
        self._checked = False

    def _start(self, array: Tensor, op: str) -> Handle:
        message = AllReduce(array, "sum" if op == "sum" else "max", donate=True)
        self._count(message)
        return self._transport.start(message, "")

    @property
    def lacking(self) -> bool:
        """Whether some ranks may have started no exchange, as they want to verify that all agree first."""
        return self._asks()

    def admits(self, message: Collective) -> bool:
        """Return whether a collective may be started: not before `check` if a rank wants to verify that all agree."""
        return self._checked or not self._asks()

    def _asks(self) -> bool:
        return bool(self._asked.result()[0].item())

    def are_complete(self) -> bool:
        """Return True: all ranks of a process group take part."""
        return True

    def undoes(self) -> bool | None:
        """Return whether all ranks undo the last step; None if not known yet."""
        return not self._asked.result()[1].item() if self._asked.done() else None

    def give(self, peak: float | Tensor, call: Hashable = None, used: bool = True) -> Tensor:
        """Contribute to the verdict on a gradient; nothing travels yet."""
        self._peaks.append(peak)
        self._used.append(used)
        return _NOTHING

    def check(self, placeholder: Tensor, number: int) -> bool:
        """Tell the other ranks of all gradients of this one; return whether a rank wants to verify."""
        self._checked = True
        if asks := self._asks():
            return asks  # ranks that differ do not meet here
        self._contribute()
        return False

    def _contribute(self) -> Handle:
        if self._heard is None:
            device = next((peak.device for peak in self._peaks if isinstance(peak, Tensor)), None)
            peaks = torch.stack([torch.as_tensor(one, dtype=torch.float32, device=device) for one in self._peaks])
            used = _USED if all(self._used) else torch.tensor(self._used, device=device) * _USED
            self._heard = self._start(torch.where(peaks.isfinite(), used, _BAD).to(torch.uint8), "max")
        return self._heard

    def are_back(self) -> bool:
        """Return whether the contributions of all ranks are known; nothing is to be waited for before `check`."""
        return not self._checked or self._contribute().done()

    @property
    def under_way(self) -> int:
        """Zero: nothing is to be polled."""
        return 0

    def first_factor(self) -> float:
        """Return nan: it is not known before the end whether the step counts."""
        return math.nan

    def factor(self, placeholder: Tensor) -> float:
        """Return the factor of a sum; not of one gradient, as contributions come back together."""
        return self._scale

    def factors(self) -> list[float]:
        """Return by what to multiply the sums of all gradients; nan where a rank had one that is not finite."""
        return [math.nan if told == _BAD else self._scale for told in self._contribute().result().tolist()]

    def unused(self) -> list[int]:
        """Return the indices of gradients whose parameter no rank has used, once `are_back`."""
        if all(self._used):
            return []
        return [number for number, told in enumerate(self._contribute().result().tolist()) if told == _UNUSED]

    def assume(self) -> None:
        """Take it that all ranks are there: they are."""

    def settle(self, patience: float | None = None) -> None:
        """Do nothing: there are no placeholders."""

    def abandon(self) -> None:
        """Do nothing: there are no placeholders."""
