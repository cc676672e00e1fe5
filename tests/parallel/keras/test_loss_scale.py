"""Loss scaling: what is kept is in true units, and a step that is skipped leaves no trace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf
from parallel.keras.training import (
    LOSS,
    Tape,
    assert_ranks_equal,
    assert_same_state,
    batches,
    small_model,
    state_of,
    trained_fit,
    weights,
)

from hvd_compress.errors import SpecError
from hvd_compress.tensorflow import Compression, caller

LossScaleOptimizer = tf.keras.mixed_precision.LossScaleOptimizer


@pytest.mark.parametrize(
    "kind", [tf.keras.optimizers.SGD, pytest.param(tf.keras.optimizers.legacy.SGD, marks=pytest.mark.long)]
)
def test_fit_with_a_scale_that_changes(kind: Any) -> None:
    """Equal bit for bit to training without one, although one rank has a bad batch: the scales are powers of two."""
    compression = Compression.topk(ratio=0.05)
    sgd = hvd_keras.DistributedOptimizer(kind(0.1, momentum=0.9), compression=compression)
    optimizer = LossScaleOptimizer(sgd, initial_scale=1024.0, dynamic_growth_steps=2)
    model = small_model()
    model.compile(optimizer=optimizer, loss=LOSS)
    x, y = batches(8)
    bad = np.full_like(x[:16], np.inf if hvd.rank() == 1 else 1.0)
    x, y = np.concatenate([x[:80], bad, x[80:]]), np.concatenate([y[:80], y[:16], y[80:]])
    model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    assert float(optimizer.loss_scale) == 1024 * 2**2 / 2 * 2
    expected, kept = trained_fit()
    np.testing.assert_array_equal(weights(model), weights(expected))
    assert_same_state(compression, kept)


def test_a_mixed_policy() -> None:
    """Keras puts a LossScaleOptimizer around Horovod's by itself."""
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = small_model()
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    compression = Compression.topk(ratio=0.05)
    sgd = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1, momentum=0.9), compression=compression)
    model.compile(optimizer=sgd, loss=LOSS)
    assert isinstance(model.optimizer, LossScaleOptimizer)
    tf.keras.mixed_precision.set_global_policy("float32")
    x, y = batches(8)
    model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    assert_ranks_equal(weights(model))
    expected, state = weights(trained_fit()[0]), state_of(trained_fit()[1])
    np.testing.assert_allclose(weights(model), expected, atol=0.02)
    assert np.abs(expected - weights(small_model())).max() > 0.05
    for path, leaf in state_of(compression).items():
        assert np.abs(leaf).max() <= 2 * np.abs(state[path]).max()  # not 32768 times as much


def scaled_run(job: Tape, scale: tf.Variable, steps: int) -> None:
    """Train with a scale that changes, as a loop of one's own does."""
    for step in range(steps):
        scale.assign(2.0 ** (3 * step))
        gradients = [g / scale for g in job.gradients(step, factor=float(scale))]
        job.optimizer.apply_gradients(zip(gradients, job.model.trainable_variables, strict=True))


def test_a_loop_that_says_what_it_scales_by() -> None:
    """Before the first step: that has the scale in its graph."""
    scale = tf.Variable(1.0)
    job, plain = (Tape("powersgd:rank=2", model=small_model()) for _ in range(2))
    job.compression.follow(scale)
    scaled_run(job, scale, 4)
    np.testing.assert_array_equal(job.weights, plain.run(4).weights)
    assert_same_state(job.compression, plain.compression)
    with pytest.raises(SpecError, match=r"follow\(\) was called after the first step"):
        plain.compression.follow(scale)


def test_what_can_be_followed() -> None:
    scaler = LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=8.0)
    legacy = LossScaleOptimizer(tf.keras.optimizers.legacy.SGD(), dynamic=False, initial_scale=8.0)
    for scale in (scaler, legacy, tf.Variable(8.0), tf.constant(8.0), lambda: scaler.loss_scale):
        assert float(caller.scale_reader(scale)()) == 8
    for wrong in (8.0, None, "dynamic", LossScaleOptimizer):
        with pytest.raises(SpecError, match=r"scaler must be a tf.keras.mixed_precision"):
            Compression.topk().follow(wrong)
    Compression.none.follow(scaler)


@pytest.mark.parametrize(
    ("op", "dtype", "largest"), [("Sum", "float16", 6e4), ("Average", "float16", 6e4), ("Sum", "float32", 3e38)]
)
def test_a_sum_beyond_its_dtype(op: str, dtype: str, largest: float) -> None:
    """It is infinite on all ranks, so nothing is kept of that step; the mean is not, so it is."""
    pattern = np.random.default_rng(0).uniform(0, 1, (40, 40)).astype(dtype)
    model = SimpleNamespace(trainable_variables=[tf.Variable(tf.zeros((40, 40), dtype))])

    def loss(model: Any, x: Any, y: Any) -> Any:
        return tf.reduce_sum(tf.cast(model.trainable_variables[0] * pattern, tf.float32))

    job = Tape("topk:ratio=0.05", model=model, loss=loss, op=getattr(hvd, op))
    job.gradients(0)
    before = state_of(job.compression)
    (gradient,) = job.gradients(0, factor=largest)
    assert gradient.dtype == dtype
    assert np.isfinite(gradient).all() == (op == "Average")
    unchanged = all((leaf == before[path]).all() for path, leaf in state_of(job.compression).items())
    assert unchanged == (op == "Sum")
    assert_ranks_equal(gradient.numpy())
