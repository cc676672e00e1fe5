"""What the ranks tell each other about a step, beside its payloads."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from torch import Tensor

from hvd_compress.core.collectives import Collective


class Votes(Protocol):
    """Whether a step counts on all ranks, and by what its sums are multiplied. There is one for each step.

    Attributes:
        nbytes: Bytes that a vote takes on the wire.
        lacking: A rank was found missing.
    """

    nbytes: int
    lacking: bool

    def admits(self, message: Collective) -> bool:
        """Whether a collective may be started, as no missing rank would spoil it."""

    def give(self, peak: float | Tensor, call: Hashable = None) -> Tensor:
        """Vote for a gradient.

        Args:
            peak: A number that is finite if the gradient is.
            call: Equal for those that come back together.

        Returns:
            The tensor to be reduced in the place of the gradient.
        """

    def check(self, carrier: Tensor, number: int) -> bool:
        """Look at the first vote that comes back.

        Args:
            carrier: What `give` returned, as it came back.
            number: Which one it is.

        Returns:
            Whether a rank wants to verify that all agree.

        Raises:
            UnsupportedError: If a rank is missing.
        """

    def are_back(self) -> bool:
        """Whether the votes of all ranks are here, once all have been given."""

    @property
    def under_way(self) -> int:
        """How many votes are not back, as far as `are_back` has looked."""

    def first_factor(self) -> float:
        """By what to multiply sums over the ranks, as far as it is known early; nan if it is not."""

    def factor(self, carrier: Tensor) -> float:
        """By what to multiply the sum of a gradient, given what `give` returned as it came back; nan if one was bad."""

    def factors(self) -> list[float]:
        """By what to multiply the sums of all gradients, once all votes are back."""

    def assume(self) -> None:
        """Take it that all ranks are there."""

    def settle(self, patience: float | None = None) -> None:
        """Wait for votes that nobody asks for any more, for so many seconds at most."""

    def abandon(self) -> None:
        """Forget votes that may still be on their way."""
