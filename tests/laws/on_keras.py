"""Programs on Horovod's gradient tapes, run eagerly."""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from laws.law import violation
from laws.program import ALL, FAMILIES, Able, Arr, Program, Step

from hvd_compress.engine.spec import as_router
from hvd_compress.tensorflow.compression import TensorFlowCompressor

ABLE = Able(
    FAMILIES,
    events=ALL - {"optimizers", "turned", "scale", "passes", "unused", "frozen", "delay", "tied", "joint"},
    chooses=True,
)


class KerasRank:
    """A rank that runs a program.

    Args:
        program: The program.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.compression = TensorFlowCompressor(as_router(program.method), program.merge)
        self.variables = [
            [tf.Variable(tf.zeros(shape), name=f"m{number}p{p}") for p, shape in enumerate(model.shapes)]
            for number, model in enumerate(program.models)
        ]

    def run(self) -> list[dict[tuple[int, int], Arr]]:
        """Return what was delivered in each step."""
        return [self._step(number, step) for number, step in enumerate(self.program.ended)]

    def _step(self, number: int, step: Step) -> dict[tuple[int, int], Arr]:
        delivered = {}
        for use in step.uses:
            variables = self.variables[use.model]
            with tf.GradientTape() as tape:
                loss = tf.add_n(
                    [
                        tf.reduce_sum(variables[p] * self.program.gradient(number, use, 0, hvd.rank(), p))
                        for p in self.program.used(number, use, 0, hvd.rank())
                    ]
                )
            tape = hvd.DistributedGradientTape(tape, compression=self.compression)
            for p, mean in enumerate(tape.gradient(loss, variables)):
                delivered[use.model, p] = np.asarray(mean, float) * hvd.size()
        return delivered


def start() -> bool:
    """Join the job; return whether this process speaks for all ranks."""
    hvd.init()
    return bool(hvd.rank() == 0)


def run(program: Program) -> str:
    """Run a program; return how it breaks the law on any rank."""
    return next(filter(None, hvd.allgather_object(violation(program, KerasRank(program).run()))), "")
