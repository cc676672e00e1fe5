"""The base class of what averages numpy arrays over MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvd_compress.local.base import Stepper
from hvd_compress.mpi.transport import Arr


class ArrayStepper(Stepper):
    """Base class of `LocalSteps` and `Gossip` over MPI, whose parameters are changed in place."""

    _parameters: Mapping[str, Arr]

    def _arrays(self) -> list[Arr]:
        return list(self._parameters.values())

    def _write(self, numbers: Sequence[int], arrays: Sequence[Arr]) -> None:
        mine = self._arrays()
        for number, array in zip(numbers, arrays, strict=True):
            mine[number][...] = array

    def step(self) -> None:
        """Do what is due in a step of this rank."""
        self._step()
