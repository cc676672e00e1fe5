"""One rank of a long job (TensorFlow): as the one of PyTorch, with traces and variables that come and go."""

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
ROUNDS = 3


def make_model(width: int, seed: int) -> Any:
    """The same weights on all ranks."""
    kernel = tf.keras.initializers.GlorotUniform(seed=seed)
    layers = [tf.keras.layers.Dense(n, activation="relu", kernel_initializer=kernel) for n in (width, 64)]
    model = tf.keras.Sequential([*layers, tf.keras.layers.Dense(10, kernel_initializer=kernel)])
    model.build((None, 32))
    return model


def train(method: str, width: int, begin: int, steps: int) -> tuple[bool, int]:
    """Train a new model; gives whether the ranks are equal at the end, and how many faults were injected."""
    model, compression = make_model(width, begin), Compression.parse(method)
    optimizer = tf.keras.optimizers.SGD(0.02)

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
    def reduced(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x))
        return hvd.DistributedGradientTape(tape, compression=compression).gradient(loss, model.trainable_variables)

    faults = 0
    for step in range(begin, begin + steps):
        x = np.random.default_rng([hvd.rank(), step]).standard_normal((16, 32)).astype(np.float32)
        y, bad = x[:, :10].argmax(1), step % FAULT_EVERY == 0
        faults += bad
        if bad and hvd.rank() == step % hvd.size():
            x[3, 3] = np.nan
        size = 16 if step % 50 else 9  # a last batch of another size
        gradients = reduced(tf.constant(x[:size]), tf.constant(y[:size]))
        if all(np.isfinite(gradient).all() for gradient in gradients) == bad:
            raise AssertionError(f"step {step}: a gradient that is not finite on one rank must be seen by all")
        if not bad:
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    weights = np.concatenate([v.numpy().ravel() for v in model.trainable_variables])
    return bool((hvd.allgather(weights[None]).numpy() == weights).all()), faults


def variables() -> int:
    """How many there are in this process."""
    return sum(isinstance(thing, tf.Variable) for thing in gc.get_objects())


def main(steps: int) -> None:
    """Train round after round."""
    hvd.init()
    each = -(-steps // (ROUNDS * len(JOBS)))
    done = faults = 0
    equal = True
    memory: list[float] = []
    counts: list[int] = []
    while done < steps:
        for method, width in JOBS.items():
            same, more = train(method, width, done, each)
            equal, faults, done = equal and same, faults + more, done + each
        tf.keras.backend.clear_session()
        gc.collect()
        memory.append(resident_mb())
        counts.append(variables())
    left = f"{counts[0]} -> {counts[-1]} variables"
    reports = everyone(Report(done, faults, memory, left, equal and counts[-1] <= counts[0]))
    if hvd.rank() == 0:
        Report.together(reports).write(sys.argv[2])


if __name__ == "__main__":
    main(int(sys.argv[1]))
