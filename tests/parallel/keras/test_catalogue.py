"""Every method, traced into a graph on real Horovod, gives what the simulator gives.

Tracing takes a second for each, so all of them are traced in one of the jobs, and one of each kind in the others.
"""

from __future__ import annotations

import os

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from catalogue import COMPOSED, EACH_KIND, SPECS, agree
from parallel.keras.training import SIZE, assert_ranks_equal
from worlds import Arr

from hvd_compress import LocalWorld
from hvd_compress.tensorflow import Compression

SHAPES = {"first": (48, 40), "second": (5, 5, 6, 8), "bias": (10,)}
ALL_HERE = "OMPI_COMM_WORLD_SIZE" in os.environ and SIZE == 2


def gradients(step: int) -> dict[str, list[Arr]]:
    """One gradient per rank for each variable."""
    rng = np.random.default_rng(step)
    ranks = range(hvd.size())
    return {name: [rng.standard_normal(shape).astype(np.float32) for _ in ranks] for name, shape in SHAPES.items()}


@pytest.mark.parametrize("spec", [*SPECS, *COMPOSED] if ALL_HERE else EACH_KIND)
def test_horovod_gives_what_the_simulator_gives(spec: str) -> None:
    world = LocalWorld(COMPOSED.get(spec, spec), hvd.size())
    compression = Compression.parse(COMPOSED.get(spec, spec))
    variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()]

    @tf.function  # type: ignore[untyped-decorator]
    def reduced(mine: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            # The gradient of this loss is what we want it to be.
            loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, mine, strict=True)])
        gradients: list[tf.Tensor] = hvd.DistributedGradientTape(tape, compression=compression).gradient(
            loss, variables
        )
        return gradients

    for step in range(3):
        grads = gradients(step)
        expected = world.step(grads)
        means = reduced([tf.constant(grads[name][hvd.rank()]) for name in SHAPES])
        for name, mean in zip(SHAPES, means, strict=True):
            if "delay" not in spec:
                assert_ranks_equal(mean.numpy())
            assert agree(spec, mean.numpy(), expected[name][hvd.rank()]), name
