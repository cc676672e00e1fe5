"""Ranks of a job of which Horovod is shut down, and started again on the first two and on the others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import horovod.tensorflow as hvd
import tensorflow as tf
from mpi4py import MPI
from parallel.keras.test_auto import CANDIDATES, SETTLED, TOPK, Clock

from hvd_compress.engine import autotune
from hvd_compress.errors import DisagreementError
from hvd_compress.tensorflow import Compression

CLOCK = Clock()


class Trained:
    """A variable, the gradient of which is 1, and the step that sums it up.

    Args:
        spec: The method.
    """

    variable = tf.Variable(tf.zeros((40, 50)), name="w")

    def __init__(self, spec: str) -> None:
        self.compression = Compression.auto(candidates=CANDIDATES) if spec == "auto" else Compression.parse(spec)
        CLOCK.compressions, CLOCK.fastest = [self.compression], TOPK
        self.step = tf.function(self._step)

    def _step(self) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.variable)
        tape = hvd.DistributedGradientTape(tape, compression=self.compression)
        return tape.gradient(loss, [self.variable])[0]


def main(spec: str, folder: str) -> None:
    """Train with all ranks; go on with two, with what was, and with what has been loaded."""
    world = MPI.COMM_WORLD
    part = world.Split(world.rank // 2, world.rank)
    hvd.init(comm=world)
    job = Trained(spec)
    given = [float(tf.reduce_sum(job.step())) for _ in range(SETTLED if spec == "auto" else 1)]
    job.compression.save(folder)
    world.Barrier()
    hvd.shutdown()
    world.Barrier()
    hvd.init(comm=part)
    refused = False
    try:
        job.step()
    except (DisagreementError, tf.errors.InvalidArgumentError) as error:
        refused = "DisagreementError: Horovod was shut down and started again with other ranks" in str(error)
    job = Trained(spec)
    job.compression.load(folder)
    given.append(float(tf.reduce_sum(job.step())))
    # What each of the four did not send of its 2000 comes with the step of the two.
    print(f"rank {world.rank} refused: {refused}, more than alone: {given[-1] > 1.5 * given[-2]}", flush=True)
    for race in job.compression.races().values():
        print(f"rank {world.rank} keeps its choice: {race.choice == TOPK and not race.comparisons}", flush=True)
    world.Barrier()
    hvd.shutdown()


if __name__ == "__main__":
    autotune.time = CLOCK  # type: ignore[assignment, attr-defined]
    main(*sys.argv[1:])
