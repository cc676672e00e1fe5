"""One rank of a long job (TensorFlow): many steps, methods and shapes in turns, and a fault now and then.

Unlike in the job of PyTorch, models live as long as the job: Horovod itself keeps what it has traced for a model.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from parallel.keras.training import LOSS, everyone
from soak.report import Report, resident_mb

from hvd_compress.tensorflow import Compression

JOBS = {"topk:ratio=0.05": 40, "powersgd:rank=2": 72, "int8": 48, "efsignsgd:twoway=on": 64}
"""Methods, and the width of the model that each of them trains."""

FAULT_EVERY = 61
ROUNDS = 10


def make_model(width: int, seed: int) -> Any:
    """The same weights on all ranks."""
    kernel = tf.keras.initializers.GlorotUniform(seed=seed)
    layers = [tf.keras.layers.Dense(n, activation="relu", kernel_initializer=kernel) for n in (width, 64)]
    model = tf.keras.Sequential([*layers, tf.keras.layers.Dense(10, kernel_initializer=kernel)])
    model.build((None, 32))
    return model


class Job:
    """A model in training.

    Args:
        method: Spec of the compression.
        width: Of the model.
    """

    def __init__(self, method: str, width: int) -> None:
        self.model, compression = make_model(width, seed=width), Compression.parse(method)
        self._optimizer = tf.keras.optimizers.SGD(0.02)

        @tf.function  # type: ignore[untyped-decorator]
        def reduced(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = LOSS(y, self.model(x))
            tape = hvd.DistributedGradientTape(tape, compression=compression)
            return tape.gradient(loss, self.model.trainable_variables)

        self._reduced = reduced

    def train(self, steps: range) -> int:
        """Make some steps; gives how many faults were injected."""
        faults = 0
        for step in steps:
            x = np.random.default_rng([hvd.rank(), step]).standard_normal((16, 32)).astype(np.float32)
            y, bad = x[:, :10].argmax(1), step % FAULT_EVERY == 0
            faults += bad
            if bad and hvd.rank() == step % hvd.size():
                x[3, 3] = np.nan
            size = 16 if step % 50 else 9  # a last batch of another size
            gradients = self._reduced(tf.constant(x[:size]), tf.constant(y[:size]))
            if all(np.isfinite(gradient).all() for gradient in gradients) == bad:
                raise AssertionError(f"step {step}: a gradient that is not finite on one rank must be seen by all")
            if not bad:
                self._optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        return faults

    def equal(self) -> bool:
        """Whether all ranks hold the same bits, and all of them are finite."""
        weights = np.concatenate([v.numpy().ravel() for v in self.model.trainable_variables])
        return bool((hvd.allgather(weights[None]).numpy() == weights).all())


def variables() -> int:
    """How many there are in this process."""
    return sum(isinstance(thing, tf.Variable) for thing in gc.get_objects())


def main(steps: int) -> None:
    """Train round after round."""
    hvd.init()
    each = -(-steps // (ROUNDS * len(JOBS)))
    jobs = [Job(method, width) for method, width in JOBS.items()]
    done = faults = 0
    memory: list[float] = []
    counts: list[int] = []
    while done < steps:
        for job in jobs:
            faults, done = faults + job.train(range(done, done + each)), done + each
        gc.collect()
        memory.append(resident_mb())
        counts.append(variables())
    left = f"{counts[0]} -> {counts[-1]} variables"
    ok = all(job.equal() for job in jobs) and counts[-1] == counts[0]
    reports = everyone(Report(done, faults, memory, left, ok))
    if hvd.rank() == 0:
        Report.together(reports).write(sys.argv[2])


if __name__ == "__main__":
    main(int(sys.argv[1]))
