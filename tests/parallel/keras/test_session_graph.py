"""Graphs for a session of TensorFlow 1: the methods without a state work there, the others say that they do not."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from hvd_compress import CompressionError
from hvd_compress.tensorflow import Compression


def step(compression: Any) -> Any:
    """The weight after a step whose gradient is 1 on rank 0, 2 on rank 1 and so on."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        weight = tf.compat.v1.get_variable("weight", initializer=tf.zeros([64, 64]))
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
        train = optimizer.minimize(tf.reduce_sum(weight * (hvd.rank() + 1.0)))
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(train)
        return session.run(weight)


@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16], ids=repr)
def test_methods_without_a_state_work(compression: Any) -> None:
    np.testing.assert_array_equal(step(compression), np.full((64, 64), -(hvd.size() + 1) / 2))


def test_the_others_refuse() -> None:
    with pytest.raises(CompressionError, match="session of TensorFlow 1"):
        step(Compression.topk(ratio=0.5))
