"""Loss scaling, bad steps, saved models, layers that begin to learn; with compression that loses something."""

from __future__ import annotations

import functools
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
    by_hand,
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


@functools.cache
def trained() -> tuple[Arr, dict[str, Arr]]:
    """Weights and state after 6 steps, which other ways are compared with."""
    compression = Compression.parse(LOSSY)
    return weights(fit(compression)), state_of(compression)


def assert_as_trained(model: Any, compression: Any) -> None:
    """The same weights and state, bit for bit; and on all ranks."""
    expected, state = trained()
    np.testing.assert_array_equal(weights(model), expected)
    assert_ranks_equal(expected)
    assert any("residual" in path and np.abs(leaf).max() > 0 for path, leaf in state.items())
    for path, leaf in state_of(compression).items():
        np.testing.assert_array_equal(leaf, state[path], err_msg=path)


def test_residuals_do_not_depend_on_the_loss_scale() -> None:
    """Powers of two change no bit."""
    compression = Compression.parse(LOSSY)
    assert_as_trained(fit(compression, optimizer=sgd(loss_scale_factor=256.0)), compression)


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
    compression, optimizer = Compression.parse(LOSSY), scaled(sgd())
    model = fit(compression, 4, optimizer)
    assert optimizer.dynamic_scale.numpy() == 8.0 * 2**2
    before, state, scale = weights(model), state_of(compression), optimizer.dynamic_scale.numpy()
    x, y = batches(range(99, 100))
    model.fit(x * (np.inf if hvd.rank() == 1 else 1.0), y, batch_size=16, verbose=0)
    scales = everyone(float(optimizer.dynamic_scale.numpy()))
    assert scales == [scale / 2] * hvd.size()
    np.testing.assert_array_equal(weights(model), before)
    for path, leaf in state_of(compression).items():
        np.testing.assert_array_equal(leaf, state[path], err_msg=path)
    assert_as_trained(go_on(model, range(4, 6)), compression)
    assert compression.stats().steps == 7


def test_without_a_loss_scale_all_ranks_see_a_bad_step() -> None:
    model = fit(compression := Compression.parse(LOSSY), 2)
    state = state_of(compression)
    x, y = batches(range(99, 100))
    model.fit(x * (np.nan if hvd.rank() == 1 else 1.0), y, batch_size=16, verbose=0)
    assert everyone(bool(np.isfinite(weights(model)).any())) == [False] * hvd.size()
    for path, leaf in state_of(compression).items():
        np.testing.assert_array_equal(leaf, state[path], err_msg=path)


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_the_method_is_chosen_by_step_times(kind: str) -> None:
    """Among those that fit the optimizer."""
    compression = Compression.parse("auto:probe=20")
    model = fit(compression, 24, getattr(keras.optimizers, kind)(1e-3))
    assert_ranks_equal(weights(model))
    (session,) = compression.sessions.values()
    race = session.race
    assert race is not None and race.adam == (kind == "Adam")
    assert race.comparisons[0].steps <= 20 and not race.compares
    assert compression.stats().chosen in {one.spec for one in race.comparisons[0].runners if one.times}


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


@pytest.mark.parametrize("kind", [Own, pytest.param(keras.optimizers.SGD, marks=pytest.mark.long)])
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

    compression = Compression.topk(ratio=1.0, min_size=0)
    model, expected = make_model(), make_model()
    frozen = model.layers[0].kernel.numpy()
    for steps, learns in ((range(3), False), (range(3, 6), True)):
        model.layers[0].trainable = expected.layers[0].trainable = learns
        fit(compression, steps, model=model)
        by_hand(steps, model=expected)
        assert np.array_equal(model.layers[0].kernel.numpy(), frozen) != learns
    assert_ranks_equal(weights(model))
    np.testing.assert_allclose(weights(model), weights(expected), rtol=0, atol=2e-5)
    assert len(compression.sessions) == 2


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.long)])
def test_two_models_share_a_compressor_and_nothing_else(eager: bool) -> None:
    compression = Compression.parse(LOSSY)
    alone = weights(fit(LOSSY, eager=True)) if eager else trained()[0]
    first = fit(compression, 3, eager=eager)
    fit(compression, range(50, 53), eager=eager)
    np.testing.assert_array_equal(weights(go_on(first, range(3, 6))), alone)
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
