"""One worker of an elastic job (TensorFlow): one of them is killed, another one joins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from parallel.keras.training import Tape, batches
from soak.elastic import Diary, Scene


def main(folder: str, spec: str) -> None:
    """Train; what happens when is in `Scene`."""
    hvd.init()
    scene = Scene(Path(folder))
    job = Tape(spec, lr=0.05)
    diary = Diary(scene)

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        diary.enter(hvd.rank(), hvd.size(), state.step)
        while state.step < scene.steps:
            scene.before(state.step)
            x, y = batches(range(state.step, state.step + 1))
            gradients = job._step(tf.constant(x), tf.constant(y), tf.constant(1.0))
            job.optimizer.apply_gradients(zip(gradients, job.model.trainable_variables, strict=True))
            state.step += 1
            if state.step % scene.commit_every == 0:
                state.commit()

    train(hvd.elastic.TensorFlowKerasState(job.model, job.optimizer, step=0))
    weights = job.weights
    diary.end(hvd.rank(), bool(np.all(hvd.allgather(weights[None]).numpy() == weights)))


if __name__ == "__main__":
    main(*sys.argv[1:])
