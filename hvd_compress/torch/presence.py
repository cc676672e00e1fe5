"""Do all ranks take part in a step? A rank that has called ``hvd.join()`` does not.

For such a rank Horovod sends zeros when the others sum. With other collectives it ends in an exception of its own, and
with MPI then hangs. The carriers, which are summed, tell in time.
"""

from __future__ import annotations

from torch import Tensor

from hvd_compress.errors import UnsupportedError
from hvd_compress.torch import caller


class Presence:
    """The roll of one step after another.

    Args:
        full: What Horovod makes of a 1 on each rank.
        size: How many ranks there are.

    Attributes:
        lacking: A rank was found missing in this step.
    """

    def __init__(self, full: float, size: int) -> None:
        self.resize(full, size)
        self.reset()

    def resize(self, full: float, size: int) -> None:
        """Go on with another number of ranks."""
        self._least = abs(full) * (1 - 0.5 / size)

    def reset(self) -> None:
        """Begin a step."""
        self.lacking = False
        self._complete = False
        self._carriers: list[Tensor] = []

    def add(self, carrier: Tensor) -> None:
        """Note a carrier that Horovod will reduce."""
        self._carriers.append(carrier)

    def is_complete(self) -> bool:
        """Whether the first carrier is back, and had been sent by all ranks."""
        if not self._complete and self._carriers:
            first = self._carriers[0]
            # To look at it would make a GPU wait for the backward pass.
            self._complete = first.device.type != "cpu" or (caller.is_reduced(first) and not self._lacks(first))
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
        """Take it that all are there."""
        self._complete = True

    def settle(self) -> None:
        """Wait for the carriers that nobody asks for any more."""
        caller.settle(self._carriers)
