"""Local steps on numpy arrays, over MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

from mpi4py import MPI

from hvd_compress.errors import SpecError
from hvd_compress.local.base import Over
from hvd_compress.local.settings import LocalOptions, settings
from hvd_compress.local.stepper import LocalStepper
from hvd_compress.mpi.aggregator import Aggregator
from hvd_compress.mpi.stepper import ArrayStepper
from hvd_compress.mpi.transport import Arr


class LocalSteps(ArrayStepper, LocalStepper):
    """Train alone for some steps, then average; see `hvd_compress.distributed.LocalSteps`.

    Use::

        local = LocalSteps({"w": w, "b": b}, every=30, compression="qsgd:bits=4")
        for batch in batches:
            w -= lr * gradient(w, b, batch)  # in place, by any optimizer
            local.step()

    Args:
        parameters: The parameters by name, which are changed in place.
        spec: ``"diloco"`` or ``"sparseloco"``.
        comm: The ranks.
        **options: See `hvd_compress.local.settings.LocalSettings`; ``compression`` is a spec, and ``fragments`` is 1.

    Raises:
        SpecError: If an option is unknown or its value is not allowed.
    """

    def __init__(
        self,
        parameters: Mapping[str, Arr],
        spec: str = "",
        comm: MPI.Comm = MPI.COMM_WORLD,
        **options: Unpack[LocalOptions],
    ) -> None:
        chosen = settings(spec, options)
        if chosen.fragments != 1:
            raise SpecError(f"fragments={chosen.fragments} is not supported by MPI alone: leave it 1")
        self._parameters = dict(parameters)
        self._aggregator = Aggregator(chosen.compression, comm)
        super().__init__(chosen, self._aggregator, self._aggregator._transport, "local_steps")

    def _start(self, arrays: Sequence[Arr], name: str) -> Over:
        means = self._aggregator.step(dict(zip(self._parameters, arrays, strict=True)))
        return Over([means[key] for key in self._parameters])

    def close(self) -> None:
        """Free the duplicate of the communicator: on all ranks together, after the last step."""
        self._aggregator.close()
