"""One rank of a job that is saved at step 20 and goes on to step 40 in new processes (TensorFlow)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from parallel.keras.training import Tape


def checkpoint(job: Tape) -> Any:
    """All that a job has to keep."""
    return tf.train.Checkpoint(model=job.model, optimizer=job.optimizer, compression=job.compression)


def first(spec: str, folder: Path) -> None:
    """Train to step 40 without a break; train another job to step 20 and save it."""
    np.save(folder / "whole.npy", Tape(spec).run(40).weights)
    checkpoint(Tape(spec).run(20)).write(str(folder / "saved"))


def second(spec: str, folder: Path) -> None:
    """Go on from step 20 and compare."""
    job = Tape(spec)
    status = checkpoint(job).read(str(folder / "saved"))
    job.run(range(20, 40))
    status.assert_consumed()
    np.testing.assert_array_equal(job.weights, np.load(folder / "whole.npy"))


if __name__ == "__main__":
    hvd.init()
    for spec in sys.argv[3:]:
        place = Path(sys.argv[2], spec.replace(":", "_"), str(hvd.rank()))
        place.mkdir(parents=True, exist_ok=True)
        {"first": first, "second": second}[sys.argv[1]](spec, place)
    print(f"{sys.argv[1]} done on rank {hvd.rank()}")
