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

Factor = float | Tensor
"""By what to multiply a sum; a tensor on a GPU, which nobody waits for."""


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
        self._finite = True
        self._doubts: list[Tensor] = []

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

    def read(self, carrier: Tensor) -> Factor:
        """By what to multiply a sum over the ranks, given its carrier as Horovod has reduced it."""
        if carrier.is_cuda:
            factor = carrier.reshape(()) / self._size
            self._doubts.append(factor)
            return factor
        value = float(carrier) / self._size
        self._finite = self._finite and math.isfinite(value)
        return value

    def doubt(self, result: Tensor) -> None:
        """Note a result that may have left the range of its dtype."""
        self._doubts.append(torch.linalg.vector_norm(result, ord=torch.inf).double())

    def are_finite(self) -> bool:
        """Whether all that was read and all results are finite."""
        return self._finite and (not self._doubts or bool(torch.stack(self._doubts).isfinite().all()))

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
