"""Keras' files and Horovod's callbacks, with a model that was compiled with a compressed optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf
from parallel.keras.training import (
    LOSS,
    assert_ranks_equal,
    assert_same_state,
    batches,
    everyone,
    fit,
    small_model,
    trained_fit,
    weights,
)

from hvd_compress.tensorflow import Compression


@pytest.fixture(scope="module")
def half() -> tuple[Any, Any]:
    """A model after half of the training that `trained_fit` does, and its compression."""
    compression = Compression.topk(ratio=0.05)
    return fit(compression, 4, model=small_model()), compression


def load(kind: str, path: str, compression: Any) -> Any:
    """Load a model; Horovod's ``load_model`` knows the optimizers of ``.h5`` by itself, but not those of ``.keras``."""
    if kind == ".h5":
        return hvd_keras.load_model(path, compression=compression)
    sgd = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(), compression=compression)
    return hvd_keras.load_model(path, custom_objects={"SGD": type(sgd)})


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.parametrize("kind", [pytest.param(".h5", marks=pytest.mark.long), ".keras"])
def test_a_model_is_loaded_and_goes_on_bit_for_bit(kind: str, half: tuple[Any, Any], tmp_path: Path) -> None:
    """The file holds the model and the optimizer, a checkpoint beside it what this rank has kept."""
    model, compression = half
    model.save(tmp_path / f"model{kind}")
    path = tf.train.Checkpoint(compression=compression).write(str(tmp_path / "kept"))
    second = Compression.topk(ratio=0.05)
    loaded = load(kind, str(tmp_path / f"model{kind}"), second)
    status = tf.train.Checkpoint(compression=second).read(path)
    x, y = batches(range(4, 8))
    loaded.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    status.assert_consumed()
    expected, kept = trained_fit()
    np.testing.assert_array_equal(weights(loaded), weights(expected))
    assert_same_state(second, kept)


def test_what_can_be_exported(half: tuple[Any, Any], tmp_path: Path) -> None:
    """The model without its optimizer, whose state is out of reach of a SavedModel."""
    model, _ = half
    model.export(tmp_path / "exported")
    model.save(tmp_path / "saved", include_optimizer=False)
    x, _ = batches(1)
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    again = tf.keras.models.load_model(tmp_path / "saved", compile=False)(x)
    np.testing.assert_allclose(exported.serve(tf.constant(x)), model(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(again, model(x), rtol=1e-5, atol=1e-6)


def test_callbacks_and_broadcasts() -> None:
    """Ranks that begin with other weights are made equal, and hear of the same loss."""
    compression = Compression.topk(ratio=0.05)
    model = small_model()
    for variable in model.variables:
        variable.assign_add(tf.fill(variable.shape, 0.1 * hvd.rank()))
    sgd = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1, momentum=0.9), compression=compression)
    model.compile(optimizer=sgd, loss=LOSS)
    callbacks = [
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd_keras.callbacks.MetricAverageCallback(),
        # Horovod's correction of the momentum does not know the optimizers of this Keras.
        hvd_keras.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5**epoch, momentum_correction=False),
    ]
    x, y = batches(4)
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False, callbacks=callbacks).history
    assert_ranks_equal(weights(model))
    assert everyone(history["loss"]) == [history["loss"]] * hvd.size()
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05)
    assert compression.stats().steps == 8

    for variable in model.variables:
        variable.assign_add(tf.fill(variable.shape, 0.1 * hvd.rank()))
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(model.optimizer.variables, root_rank=0)
    model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    assert_ranks_equal(weights(model))
