"""Where nothing is lost, training is what it is on the mean of the gradients, in every way of using Keras 3."""

from __future__ import annotations

import functools
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf
from keras3.training import ALONE, LOSS, Arr, assert_ranks_equal, batches, by_hand, fit, keras, make_model, sgd, weights

from hvd_compress.keras import Compression, DistributedOptimizer

LOSSLESS = "topk:ratio=1.0"

OPTIONS: dict[str, Any] = {
    "groups": 2,
    "gradient_predivide_factor": 2.0,
    "sparse_as_dense": True,
    "backward_passes_per_step": 1,
}


@functools.cache
def mean_training() -> Arr:
    return by_hand()


def assert_equal_training(actual: Arr, expected: Arr) -> None:
    """Both have trained, to the same weights up to float rounding; and so have all ranks."""
    assert_ranks_equal(actual)
    assert np.abs(expected - weights(make_model())).max() > 0.01
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        pytest.param(LOSSLESS, {}, id="graph"),
        pytest.param(LOSSLESS, {"eager": True}, id="eager"),
        pytest.param(LOSSLESS, OPTIONS, id="options"),
        pytest.param(hvd.Compression.none, {}, id="horovod's own"),
        pytest.param("none", {"eager": True}, id="none eager", marks=pytest.mark.long),
        pytest.param("powersgd:rank=64,min_gain=0,min_size=0", {}, id="powersgd", marks=pytest.mark.long),
    ],
)
def test_fit(spec: Any, options: dict[str, Any]) -> None:
    assert_equal_training(weights(fit(spec, **options)), mean_training())


def test_groups_of_variables() -> None:
    model = make_model()
    variables = [v.value for v in model.trainable_variables]
    assert_equal_training(weights(fit("none", model=model, groups=[variables[:2], variables[2:]])), mean_training())


def test_sum() -> None:
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    assert_equal_training(weights(fit(LOSSLESS, optimizer=optimizer, op=hvd.Sum)), mean_training())


OPTIMIZERS: dict[str, Any] = {
    "accumulation": lambda: sgd(gradient_accumulation_steps=2),
    "clipping": lambda: sgd(global_clipnorm=0.1),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.9)),
}


@pytest.mark.parametrize(
    "name", ["accumulation", "clipping", *(pytest.param(name, marks=pytest.mark.long) for name in ("adam", "schedule"))]
)
def test_optimizers(name: str) -> None:
    make = OPTIMIZERS[name]
    assert_equal_training(weights(fit("none", optimizer=make())), by_hand(optimizer=make()))


@pytest.mark.long
def test_horovods_own_never_reduces() -> None:
    """Why there is one here."""
    model = make_model()
    model.compile(optimizer=hvd_keras.DistributedOptimizer(sgd()), loss=LOSS)
    model.fit(*batches(6), batch_size=16, verbose=0, shuffle=False)
    np.testing.assert_allclose(weights(model), by_hand(ranks=(hvd.rank(),)), rtol=0, atol=2e-5)


def test_ranks_begin_alike() -> None:
    """In place of Horovod's callback."""
    model = make_model()
    model.set_weights([w + hvd.rank() for w in model.get_weights()])
    hvd.broadcast_variables([v.value for v in model.variables], root_rank=0)
    np.testing.assert_array_equal(weights(model), weights(make_model()))


def test_process_sets_train_apart() -> None:
    alone = weights(fit(LOSSLESS, process_set=ALONE[hvd.rank()]))
    np.testing.assert_allclose(alone, by_hand(ranks=(hvd.rank(),)), rtol=0, atol=2e-5)


def loop(gradients: Any, optimizer: Any, model: Any, eager: bool) -> Arr:
    """A custom loop of 6 steps."""

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x))
        optimizer.apply_gradients(zip(gradients(tape, loss), model.trainable_variables, strict=True))

    step = step if eager else tf.function(step)
    for number in range(6):
        step(*map(tf.constant, batches(range(number, number + 1))))
    return weights(model)


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.long)])
def test_custom_loop(eager: bool) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(sgd(), compression=Compression.topk(ratio=1.0))
    trained = loop(lambda tape, loss: tape.gradient(loss, model.trainable_variables), optimizer, model, eager)
    assert_equal_training(trained, mean_training())


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.long)])
def test_custom_loop_with_horovods_tape(eager: bool) -> None:
    """It wants TensorFlow's variables, in place of Keras's."""
    model, compression = make_model(), Compression.topk(ratio=1.0)

    def gradients(tape: Any, loss: Any) -> Any:
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    assert_equal_training(loop(gradients, sgd(), model, eager), mean_training())


def test_apply_without_variables() -> None:
    """As in `optimizer.apply(gradients)`, once built."""
    model = make_model()
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), compression=Compression.topk(ratio=1.0))
    optimizer.build(model.trainable_variables)
    before = weights(model)
    optimizer.apply([tf.ones(v.shape) * (hvd.rank() + 1) for v in model.trainable_variables])
    np.testing.assert_allclose(before - weights(model), 1.5, rtol=1e-6)


@pytest.mark.parametrize("as_dense", [False, pytest.param(True, marks=pytest.mark.long)])
def test_indexed_slices_beside_compressed_gradients(as_dense: bool) -> None:
    table = np.random.default_rng(0).standard_normal((50, 32)).astype(np.float32)

    def train(spec: str) -> Arr:
        embed = keras.layers.Embedding(50, 32, embeddings_initializer=keras.initializers.Constant(table))
        layers = [keras.Input(()), embed, *make_model().layers]
        model, optimizer = keras.Sequential(layers), keras.optimizers.LossScaleOptimizer(sgd())
        model.compile(
            DistributedOptimizer(optimizer, compression=Compression.parse(spec), sparse_as_dense=as_dense), LOSS
        )
        _, y = batches(4)
        model.fit(y + 10 * hvd.rank(), y, batch_size=16, verbose=0, shuffle=False)
        return weights(model)

    plain, compressed = train("none"), train(LOSSLESS)
    np.testing.assert_allclose(compressed, plain, rtol=0, atol=2e-5)
    assert_ranks_equal(compressed)
