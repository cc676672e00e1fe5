"""A rank of a training in Keras: ``python -m hvd_compress.tools.compare.keras_worker JOB``, as JSON.

The loop is one of TensorFlow, with Horovod's gradient tape: the gradients are in hand where they have been reduced, so
that they can be clipped.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from typing import Any

from hvd_compress.agreement import refuse_momentum
from hvd_compress.errors import UnsupportedError
from hvd_compress.spec import parse
from hvd_compress.stats import Stats
from hvd_compress.tools.compare.job import Job
from hvd_compress.tools.compare.training import Setting, Training
from hvd_compress.tools.compare.worker import main, merged

tf = importlib.import_module("tensorflow")
hvd = importlib.import_module("horovod.tensorflow")

Tape = Any


class KerasTrainer:
    """What Keras adds to the loop.

    Raises:
        UnsupportedError: If there is one rank only.
    """

    def __init__(self) -> None:
        hvd.init()
        if hvd.size() == 1:
            raise UnsupportedError(
                "one rank exchanges and compresses nothing in Keras: take 2 ranks or more, or PyTorch, where one does"
            )
        self.rank = hvd.rank()
        self.size = hvd.size()
        self.counts_bytes = hvd.local_size() == 1

    def build(self, make: Callable[[Setting], Training], setting: Setting) -> Training:
        """Make the model from the same seed on all ranks; what comes then, as dropout, differs between them."""
        tf.keras.utils.set_random_seed(setting.seed)
        self._training = make(setting)
        self._before = self._training.model.get_weights()
        self._seed = 1000 * (setting.seed + 1) + setting.rank
        optimizer = self._training.optimizer
        self._alone = self._stepping(type(optimizer).from_config(optimizer.get_config()), lambda tape: tape)
        return self._training

    def step_alone(self, batch: Any) -> None:
        """Make a step in which nothing is exchanged."""
        self._sample = batch
        self._alone(batch)

    def distribute(self, spec: str, job: Job) -> None:
        """Begin anew, with the same weights on all ranks and gradients that are compressed.

        The step is traced here, which is no part of training.
        """
        del self._alone
        adapter = importlib.import_module("hvd_compress.tensorflow")
        optimizer = self._training.optimizer
        refuse_momentum(parse(spec), lambda: adapter.caller.momentum(optimizer))  # a tape does not know its optimizer
        self._training.model.set_weights(self._before)
        tf.keras.utils.set_random_seed(self._seed)
        hvd.broadcast_variables([_plain(v) for v in self._training.model.variables], root_rank=0)
        self._compression = adapter.Compression.parse(spec, **merged(parse(spec), job))
        self._step = self._stepping(optimizer, self._distributed)
        self._step.get_concrete_function(self._sample)

    def _distributed(self, tape: Tape) -> Tape:
        """Sparse gradients, as of embeddings, become dense: otherwise they are gathered and not compressed."""
        return hvd.DistributedGradientTape(tape, compression=self._compression, sparse_as_dense=True)

    def _stepping(self, optimizer: Any, distributed: Callable[[Tape], Tape]) -> Any:
        """A step as a graph; it gives the loss."""
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
        """Make a step."""
        return float(self._step(batch))

    def evaluate(self) -> float:
        """What the task says."""
        return float(self._training.evaluate(self._training.model))

    def gather(self, values: list[float]) -> list[list[float]]:
        """The values of all ranks."""
        found: list[list[float]] = hvd.allgather(tf.constant([values], tf.float64), name="lab").numpy().tolist()
        return found

    def stats(self) -> Stats:
        """Of the compression."""
        found: Stats = self._compression.stats()
        return found

    def fingerprint(self) -> float:
        """A checksum of the parameters."""
        total = 0
        for variable in self._training.model.trainable_variables:
            total = zlib.crc32(variable.numpy().tobytes(), total)
        return float(total)

    def numel(self) -> int:
        """Of the parameters that are trained."""
        return sum(int(tf.size(_plain(variable))) for variable in self._training.model.trainable_variables)


def _plain(variable: Any) -> Any:
    """TensorFlow's variable behind one of Keras 3, which is not one itself."""
    return variable if isinstance(variable, tf.Variable) else variable.value


if __name__ == "__main__":
    main("keras", KerasTrainer)
