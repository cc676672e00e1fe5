"""The tensors of one element that Horovod reduces in the place of the gradients.

Each holds 1, or nan if its gradient is not finite. What comes back tells by what Horovod scales sums and whether all
ranks had a finite gradient; and whether they all take part: for a rank that has called ``hvd.join()`` Horovod sends
zeros. With other collectives than sums it ends in an exception of its own there, and with MPI then hangs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hvd_compress.errors import UnsupportedError
from hvd_compress.torch import caller

CARRIER_BYTES = 8


class Carriers:
    """The carriers of one step after another.

    Args:
        full: What Horovod makes of a 1 on each rank.
        size: How many ranks there are.
        most: How many gradients a step has at most.

    Attributes:
        lacking: A rank was found missing in this step.
    """

    def __init__(self, full: float, size: int, most: int) -> None:
        self._most = most
        self._on_host: list[Tensor] = []
        self.resize(full, size)
        self.renew()

    def resize(self, full: float, size: int) -> None:
        """Go on with another number of ranks."""
        self._least = abs(full) * (1 - 0.5 / size)
        self._size = size

    def reset(self) -> None:
        """Begin a step."""
        self.lacking = False
        self._complete = False
        self._first: int | None = None
        self._given: list[Tensor] = []
        self._handles: list[int] | None = None

    def renew(self) -> None:
        """Begin a step after one that has left carriers with Horovod."""
        self._ones = torch.ones(self._most, dtype=torch.float64, device="cpu")
        self._on_host = list(self._ones.view(-1, 1).unbind())
        self.reset()

    def give(self, peak: float | Tensor) -> Tensor:
        """A carrier for a gradient.

        Args:
            peak: The gradient's largest magnitude, or any other number that is finite if the gradient is.
        """
        if isinstance(peak, Tensor):
            carrier = (peak * 0 + 1).to(torch.float64).reshape(1)
        else:
            if not self._given:
                self._ones.fill_(1)
            carrier = self._on_host[len(self._given)]
            if not math.isfinite(peak):
                carrier.fill_(math.nan)
        self._given.append(carrier)
        return carrier

    def are_back(self) -> bool:
        """Whether all carriers are back, once all have been handed to Horovod."""
        if self._handles is None:
            self._handles = caller.handles_of(self._given)
        while self._handles and caller.is_done(self._handles[-1]):
            self._handles.pop()
        return not self._handles

    @property
    def under_way(self) -> int:
        """How many handles of carriers are not back, as far as `are_back` has looked."""
        return len(self._handles or ())

    def look_again(self) -> None:
        """Have `are_back` ask Horovod anew which carriers it has: some may have been given back."""
        self._handles = self._handles and None

    def first_factor(self) -> float:
        """By what to multiply sums over the ranks, as far as the first carrier tells; nan if it does not."""
        first = self._given[0] if self._given else None
        if first is None or first.is_cuda or not self.are_complete():
            return math.nan
        return self.factor(first)

    def factor(self, carrier: Tensor) -> float:
        """By what to multiply a sum over the ranks, given its carrier as Horovod has reduced it."""
        return float(carrier) / self._size

    def factors(self) -> list[float]:
        """By what to multiply the sums of all gradients, once all carriers are back."""
        values = self._ones[: len(self._given)]
        if any(carrier.is_cuda for carrier in self._given):
            values = torch.cat([carrier.to("cpu", torch.float64) for carrier in self._given])
        factors: list[float] = (values / self._size).tolist()
        return factors

    def are_complete(self) -> bool:
        """Whether the first carrier is back, and had been sent by all ranks."""
        if not self._complete and self._given:
            first = self._given[0]
            if first.is_cuda:  # to look at it would make the GPU wait for the backward pass
                self._complete = True
            else:
                self._first = next(iter(caller.handles_of([first])), None) if self._first is None else self._first
                self._complete = caller.is_done(self._first) and not self._lacks(first)
        return self._complete

    def check(self, carrier: Tensor) -> None:
        """Look at a carrier that Horovod has reduced.

        Raises:
            UnsupportedError: If a rank is missing.
        """
        self.lacking = self._lacks(carrier)
        if self.lacking:
            raise UnsupportedError(
                "a rank has called hvd.join() while others go on: this compression needs all ranks in each step; give"
                " all ranks the same number of batches, or use Compression.none or Compression.fp16"
            )
        self._complete = True

    def _lacks(self, carrier: Tensor) -> bool:
        return abs(float(carrier)) < self._least

    def assume(self) -> None:
        """Take it that all ranks are there."""
        self._complete = True

    def settle(self) -> None:
        """Wait for the carriers that nobody asks for any more."""
        caller.settle(self._given)
