"""Loss scaling, bad steps, saved models, layers that begin to learn; with compression that loses something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from keras3.training import (
    LOSS,
    Arr,
    assert_ranks_equal,
    batches,
    everyone,
    fit,
    go_on,
    keras,
    make_model,
    sgd,
    state_of,
    weights,
)

from hvd_compress.keras import Compression, DistributedOptimizer

LOSSY = "topk:ratio=0.05"


def scaled(optimizer: Any) -> Any:
    """With a loss scale that grows every second step."""
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0, dynamic_growth_steps=2)


def test_residuals_do_not_depend_on_the_loss_scale() -> None:
    """Powers of two change no bit."""
    compressions = [Compression.parse(LOSSY) for _ in range(3)]
    optimizers = [sgd(), scaled(sgd()), sgd(loss_scale_factor=256.0)]
    plain, *others = (weights(fit(c, optimizer=o)) for c, o in zip(compressions, optimizers, strict=True))
    assert_ranks_equal(plain)
    assert optimizers[1].dynamic_scale.numpy() == 8.0 * 2**3
    states = [state_of(compression) for compression in compressions]
    assert any("residual" in path and np.abs(leaf).max() > 0 for path, leaf in states[0].items())
    for other, state in zip(others, states[1:], strict=True):
        np.testing.assert_array_equal(other, plain)
        for path, leaf in states[0].items():
            np.testing.assert_array_equal(state[path], leaf)


def test_16_bits_travel_scaled() -> None:
    """Gradients that 16 bits hold only if they are scaled."""
    model = make_model()
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1e8, loss_scale_factor=2.0**15), compression=Compression.fp16)
    optimizer.build(model.trainable_variables)
    before = weights(model)
    optimizer.apply([tf.fill(v.shape, 1e-9 * 2.0**15) for v in model.trainable_variables])
    np.testing.assert_allclose(before - weights(model), 0.1, rtol=1e-2)


def test_a_bad_step_leaves_no_trace() -> None:
    """Of one rank only: all skip it, halve the scale, and go on as if it had never been."""
    compression, calm_compression = Compression.parse(LOSSY), Compression.parse(LOSSY)
    optimizer = scaled(sgd())
    model = fit(compression, 3, optimizer)
    before, state, scale = weights(model), state_of(compression), optimizer.dynamic_scale.numpy()
    x, y = batches(range(99, 100))
    model.fit(x * (np.inf if hvd.rank() == 1 else 1.0), y, batch_size=16, verbose=0)
    scales = everyone(float(optimizer.dynamic_scale.numpy()))
    assert scales == [scale / 2] * hvd.size()
    np.testing.assert_array_equal(weights(model), before)
    for path, leaf in state_of(compression).items():
        np.testing.assert_array_equal(leaf, state[path], err_msg=path)
    calm = weights(fit(calm_compression, 5))
    np.testing.assert_array_equal(weights(go_on(model, range(3, 5))), calm)
    assert compression.stats().steps == 6


def test_without_a_loss_scale_all_ranks_see_a_bad_step() -> None:
    model = fit(compression := Compression.parse(LOSSY), 2)
    state = state_of(compression)
    x, y = batches(range(99, 100))
    model.fit(x * (np.nan if hvd.rank() == 1 else 1.0), y, batch_size=16, verbose=0)
    assert everyone(bool(np.isfinite(weights(model)).any())) == [False] * hvd.size()
    for path, leaf in state_of(compression).items():
        np.testing.assert_array_equal(leaf, state[path], err_msg=path)


def test_mixed_precision() -> None:
    """The policy under which Keras wants a loss scale."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        compression = Compression.parse(LOSSY)
        model = fit(compression, 6, keras.optimizers.LossScaleOptimizer(sgd()))
    finally:
        keras.config.set_dtype_policy("float32")
    assert_ranks_equal(weights(model))
    assert np.abs(weights(model) - weights(make_model())).max() > 0.01
    assert compression.stats().steps == 6 and compression.stats().ratio > 2


@keras.utils.register_keras_serializable("tests")
class Own(keras.optimizers.SGD):  # type: ignore[misc]
    """A user's optimizer."""


@pytest.mark.parametrize("kind", [keras.optimizers.SGD, Own])
def test_a_saved_model_goes_on_bit_for_bit(kind: Any, tmp_path: Path) -> None:
    """It is saved with the plain optimizer; the compressor is saved beside it."""
    compression, path = Compression.parse(LOSSY), tmp_path / "model.keras"
    model = fit(compression, 3, kind(0.1, momentum=0.9))
    model.save(path)
    saved = tf.train.Checkpoint(compression=compression).write(str(tmp_path / "compression"))

    loaded, again = keras.models.load_model(path), Compression.parse(LOSSY)
    assert type(loaded.optimizer) is kind
    tf.train.Checkpoint(compression=again).restore(saved)
    loaded.compile(DistributedOptimizer(loaded.optimizer, compression=again), LOSS)
    for each in (model, loaded):
        go_on(each, range(3, 6))
    assert loaded.optimizer.iterations.numpy() == 6
    np.testing.assert_array_equal(weights(loaded), weights(model))
    assert_ranks_equal(weights(loaded))


def test_a_layer_begins_to_learn() -> None:
    """Which changes the list of variables; the compressor stays."""

    def train(compression: Any) -> Arr:
        model = make_model()
        model.layers[0].trainable = False
        frozen = model.layers[0].kernel.numpy()
        fit(compression, 3, model=model)
        np.testing.assert_array_equal(model.layers[0].kernel.numpy(), frozen)
        model.layers[0].trainable = True
        return weights(fit(compression, range(3, 6), model=model))

    compression = Compression.topk(ratio=1.0, min_size=0)
    trained = train(compression)
    assert_ranks_equal(trained)
    np.testing.assert_allclose(trained, train(Compression.none), rtol=0, atol=2e-5)
    assert len(compression.sessions) == 2


@pytest.mark.parametrize("eager", [False, True])
def test_two_models_share_a_compressor_and_nothing_else(eager: bool) -> None:
    compression = Compression.parse(LOSSY)
    alone = weights(fit(LOSSY, 2, eager=eager))
    first = fit(compression, 1, eager=eager)
    fit(compression, range(50, 51), eager=eager)
    np.testing.assert_array_equal(weights(go_on(first, range(1, 2))), alone)
    assert len(compression.sessions) == 2


def test_a_new_trace_goes_on_with_the_same_state() -> None:
    """A batch of another size makes TensorFlow trace anew."""
    model = fit(compression := Compression.parse(LOSSY), 2)
    before = state_of(compression)
    x, y = batches(1)
    model.fit(x[:5], y[:5], batch_size=5, verbose=0)
    assert state_of(compression).keys() == before.keys() and len(compression.sessions) == 1
    assert compression.stats().steps == 3
    assert_ranks_equal(weights(model))
