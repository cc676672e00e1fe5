"""Interface of votes, by which ranks agree on the validity of a step."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from torch import Tensor

from hvd_compress.core.collectives import Collective


class Votes(Protocol):
    """Votes of one step, one per gradient: whether the gradients are finite, and the factor of their sums.

    Attributes:
        nbytes: Bytes of a vote on the wire.
    """

    nbytes: int

    @property
    def lacking(self) -> bool:
        """Whether a rank is missing, or may have started no exchange."""

    def admits(self, message: Collective) -> bool:
        """Return whether a collective may be started, because no missing rank can break it."""

    def give(self, peak: float | Tensor, call: Hashable = None, used: bool = True) -> Tensor:
        """Vote for a gradient.

        Args:
            peak: A number that is finite if the gradient is.
            call: Equal for votes that are returned together.
            used: Whether this rank has used the parameter.

        Returns:
            The tensor to reduce instead of the gradient.
        """

    def check(self, carrier: Tensor, number: int) -> bool:
        """Check the first returned vote.

        Args:
            carrier: The reduced tensor of `give`.
            number: Index of the vote.

        Returns:
            Whether a rank wants to verify that all agree.

        Raises:
            UnsupportedError: If a rank is missing.
        """

    def are_complete(self) -> bool:
        """Return whether all ranks are known to take part, before `check`."""

    def undoes(self) -> bool | None:
        """Return whether all ranks undo the last step, as its gradients were discarded; None if not known yet."""

    def are_back(self) -> bool:
        """Return whether all votes have been reduced, once all have been given."""

    @property
    def under_way(self) -> int:
        """Number of votes in flight, as of the last call of `are_back`."""

    def first_factor(self) -> float:
        """Return the factor of sums over the ranks, if it is already known; else nan."""

    def factor(self, carrier: Tensor) -> float:
        """Return the factor of a gradient's sum, given the reduced tensor of `give`; nan if it is not finite."""

    def factors(self) -> list[float]:
        """Return the factors of the sums of all gradients, once all votes have been reduced."""

    def unused(self) -> list[int]:
        """Return the indices of gradients whose parameter no rank has used, once all votes have been reduced."""

    def assume(self) -> None:
        """Assume that no rank is missing."""

    def settle(self, patience: float | None = None) -> None:
        """Wait for abandoned votes, for at most ``patience`` seconds."""

    def abandon(self) -> None:
        """Forget votes that may still be in flight."""
