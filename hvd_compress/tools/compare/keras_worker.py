"""A rank of a training in Keras: ``python -m hvd_compress.tools.compare.keras_worker JOB``, as JSON.

The loop is one of TensorFlow, with Horovod's gradient tape: the gradients are in hand where they have been reduced, so
that they can be clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy.typing as npt
import tensorflow as tf

from hvd_compress.checkpoint.agreement import check_optimizer
from hvd_compress.engine.spec import parse
from hvd_compress.errors import UnsupportedError
from hvd_compress.lab import Setting, Training
from hvd_compress.tensorflow import Compression, caller
from hvd_compress.tools.compare.job import Job
from hvd_compress.tools.compare.worker import main, merged
from hvd_compress.tools.ranks.keras import KerasRank
from hvd_compress.tools.ranks.process import Device

Tape = Any


class KerasTrainer(KerasRank):
    """Training in Keras.

    Raises:
        UnsupportedError: If there is one rank only.
    """

    def __init__(self, specs: Sequence[str], device: Device) -> None:
        super().__init__(specs, device)
        if self.size == 1:
            raise UnsupportedError(
                "one rank exchanges and compresses nothing in Keras: take 2 ranks or more, or PyTorch, where one does"
            )

    def build(self, make: Callable[[Setting], Training], setting: Setting) -> Training:
        tf.keras.utils.set_random_seed(setting.seed)
        self._training = make(setting)
        self._before = self._training.model.get_weights()
        self._rate = self.learning_rate()
        self._seed = 1000 * (setting.seed + 1) + setting.rank
        optimizer = self._training.optimizer
        self._alone = self._stepping(type(optimizer).from_config(optimizer.get_config()), lambda tape: tape)
        return self._training

    def step_alone(self, batch: Any) -> None:
        self._sample = batch
        self._alone(batch)

    def distribute(self, spec: str, job: Job) -> None:
        """Begin anew, with the same weights on all ranks and gradients that are compressed.

        The step is traced here, which is no part of training.
        """
        del self._alone
        optimizer = self._training.optimizer
        check_optimizer(parse(spec), caller.optimizer_facts(optimizer))  # a tape does not know its optimizer
        self._training.model.set_weights(self._before)
        tf.keras.utils.set_random_seed(self._seed)
        hvd.broadcast_variables([_plain(v) for v in self._training.model.variables], root_rank=0)
        self.compression = Compression.parse(spec, **merged(spec, job))
        self._step = self._stepping(optimizer, self._distributed)
        self._step.get_concrete_function(self._sample)

    def finish(self) -> None:
        """Do nothing: all ranks have the same weights."""

    def _distributed(self, tape: Tape) -> Tape:
        """Make sparse gradients dense, as those of embeddings: otherwise they are gathered and not compressed."""
        return hvd.DistributedGradientTape(tape, compression=self.compression, sparse_as_dense=True)

    def _stepping(self, optimizer: Any, distributed: Callable[[Tape], Tape]) -> Any:
        """Return a step as a graph, which gives the loss."""
        training = self._training
        variables = training.model.trainable_variables
        optimizer.build(variables)

        @tf.function  # type: ignore[untyped-decorator]
        def step(batch: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = training.loss(training.model, batch)
            gradients = distributed(tape).gradient(loss, [_plain(v) for v in variables])
            if training.clip is not None:
                gradients, _ = tf.clip_by_global_norm(gradients, training.clip)
            optimizer.apply_gradients(zip(gradients, variables))  # noqa: B905  # AutoGraph knows no strict
            return loss

        return step

    def step(self, batch: Any) -> float:
        return float(self._step(batch))

    def evaluate(self) -> float:
        return float(self._training.evaluate(self._training.model))

    def learning_rate(self) -> float:
        return float(self._training.optimizer.learning_rate)

    def scale_rate(self, factor: float) -> None:
        self._training.optimizer.learning_rate = factor * self._rate

    def weights(self) -> Iterator[npt.NDArray[Any]]:
        return (variable.numpy() for variable in self._training.model.trainable_variables)


def _plain(variable: Any) -> Any:
    """Return TensorFlow's variable behind one of Keras 3, which is not one itself."""
    return variable if isinstance(variable, tf.Variable) else variable.value


if __name__ == "__main__":
    main("keras", KerasTrainer)
