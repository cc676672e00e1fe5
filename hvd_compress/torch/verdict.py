"""Interface of the verdict on a step: whether it counts, as all ranks agree."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from torch import Tensor

from hvd_compress.core.collectives import Collective


class StepVerdict(Protocol):
    """Verdict on one step: which gradients are finite on all ranks, and the factor of their sums.

    Attributes:
        nbytes: Bytes of a placeholder on the wire.
    """

    nbytes: int

    @property
    def lacking(self) -> bool:
        """Whether a rank is missing, or may have started no exchange."""

    def admits(self, message: Collective) -> bool:
        """Return whether a collective may be started, because no missing rank can break it."""

    def give(self, peak: float | Tensor, call: Hashable = None, used: bool = True) -> Tensor:
        """Contribute to the verdict on a gradient.

        Args:
            peak: A number that is finite if the gradient is.
            call: Equal for placeholders that are returned together.
            used: Whether this rank has used the parameter.

        Returns:
            The tensor to reduce instead of the gradient.
        """

    def check(self, placeholder: Tensor, number: int) -> bool:
        """Check the first returned placeholder.

        Args:
            placeholder: The reduced tensor of `give`.
            number: Index of the placeholder.

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
        """Return whether the contributions of all ranks are back, once all have been given."""

    @property
    def under_way(self) -> int:
        """Number of placeholders in flight, as of the last call of `are_back`."""

    def first_factor(self) -> float:
        """Return the factor of sums over the ranks, if it is already known; else nan."""

    def factor(self, placeholder: Tensor) -> float:
        """Return the factor of a gradient's sum, given the reduced tensor of `give`; nan if it is not finite."""

    def factors(self) -> list[float]:
        """Return the factors of the sums of all gradients, nan where one is not finite, once `are_back`."""

    def unused(self) -> list[int]:
        """Return the indices of gradients whose parameter no rank has used, once `are_back`."""

    def assume(self) -> None:
        """Assume that no rank is missing."""

    def settle(self, patience: float | None = None) -> None:
        """Wait for abandoned placeholders, for at most ``patience`` seconds."""

    def abandon(self) -> None:
        """Forget placeholders that may still be in flight."""
