"""Local steps of a Keras model, over Horovod."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Unpack

import horovod.tensorflow as hvd
import numpy as np

from hvd_compress.errors import StateError, UnsupportedError
from hvd_compress.keras.keras3 import keras
from hvd_compress.local.base import Over
from hvd_compress.local.settings import LocalOptions, compressor, settings
from hvd_compress.local.stepper import LocalStepper
from hvd_compress.tensorflow import Compression, TensorFlowCompressor
from hvd_compress.tensorflow.transport import EagerTransport


class _ModelStepper(LocalStepper):
    """Local steps of the trainable variables of a model."""

    def __init__(self, callback: LocalSteps) -> None:
        self._variables = callback.model.trainable_variables
        self._process_set = callback.process_set
        compression = callback.compression
        number = next(compression._memo.ordinals.setdefault("local_steps", count()))
        transport = EagerTransport.of(callback.process_set)
        label = f"local_steps.{number}" if number else "local_steps"
        super().__init__(callback.settings, compression, transport, label, transport.members)

    def _arrays(self) -> list[Any]:
        return [np.array(variable) for variable in self._variables]

    def _write(self, numbers: Sequence[int], arrays: Sequence[Any]) -> None:
        for number, array in zip(numbers, arrays, strict=True):
            self._variables[number].assign(array)

    def _start(self, arrays: Sequence[Any], name: str) -> Over:
        options = {"op": hvd.Average, "compression": self._compression, "process_set": self._process_set}
        return Over([np.array(mean) for mean in hvd.grouped_allreduce(list(arrays), name=name, **options)])


class LocalSteps(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """A callback of ``fit`` that averages models every few steps, in place of gradients in each.

    Use::

        model.compile(optimizer="adamw", loss=loss)  # without hvd.DistributedOptimizer
        model.fit(x, y, callbacks=[LocalSteps(every=30, compression="qsgd:bits=4")])

    See `hvd_compress.distributed.LocalSteps`. All ranks begin ``fit`` with the parameters of the first one. They are
    validated as the global model of the last average, and averaged at the end of ``fit``. An exchange does not overlap
    with the next steps.

    Args:
        spec: ``"diloco"``, ``"streaming"`` or ``"sparseloco"``.
        process_set: The ranks that average.
        **options: See `hvd_compress.local.settings.LocalSettings`.

    Raises:
        SpecError: If an option is unknown or its value is not allowed.
    """

    def __init__(
        self, spec: str = "", process_set: Any = hvd.global_process_set, **options: Unpack[LocalOptions]
    ) -> None:
        super().__init__()
        self.settings = settings(spec, options)
        given = self.settings.compression
        self.compression = compressor(given, Compression.parse, TensorFlowCompressor, "hvd_compress.keras")
        self.process_set = process_set
        self._stepper: _ModelStepper | None = None
        self._folder: tuple[str | os.PathLike[str], int | None] | None = None
        self._validation: Any = None
        self._batch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin with the parameters of the first rank, or with what was loaded."""
        if self._stepper is None:
            self._stepper = _ModelStepper(self)
        if self._folder is not None:
            (folder, step), self._folder = self._folder, None
            self._stepper.load(folder, step)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Note the number of the batch."""
        self._batch = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Do what is due after a step.

        Raises:
            UnsupportedError: If Keras makes several steps at a time.
        """
        assert self._stepper is not None
        if batch != self._batch:
            raise UnsupportedError("LocalSteps is not supported with steps_per_execution: leave it out of compile")
        self._stepper._step()

    def on_train_end(self, logs: Any = None) -> None:
        """Average what is left."""
        assert self._stepper is not None
        self._stepper.finish()

    def on_test_begin(self, logs: Any = None) -> None:
        """Validate the global model."""
        if self._stepper is not None:
            self._validation = self._stepper.averaged()
            self._validation.__enter__()

    def on_test_end(self, logs: Any = None) -> None:
        """Go on with the parameters of this rank."""
        if self._validation is not None:
            self._validation.__exit__(None, None, None)
            self._validation = None

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the global model in the place of this rank's parameters; see `LocalStepper.averaged`."""
        with self._begun("averaged").averaged():
            yield

    def save(self, folder: str | os.PathLike[str], step: int | None = None) -> Path:
        """Save the global model, its momentum and residuals, on all ranks; see `LocalStepper`."""
        return self._begun("save").save(folder, step)

    def load(self, folder: str | os.PathLike[str], step: int | None = None) -> None:
        """Load the newest complete save in a folder, at once or when ``fit`` begins."""
        if self._stepper is None:
            self._folder = folder, step
        else:
            self._stepper.load(folder, step)

    def stats(self) -> Any:
        """Return bytes and times of this rank so far; an exchange of a fragment counts as a step."""
        return self.compression.stats()

    def _begun(self, what: str) -> _ModelStepper:
        if self._stepper is None:
            raise StateError(f"LocalSteps.{what}() needs a model, which it has once fit has begun")
        return self._stepper
