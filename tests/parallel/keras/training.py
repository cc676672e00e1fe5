"""A small model, its training on stock Horovod in every way of Keras and TensorFlow, and questions to all ranks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeAlias

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_compress.tensorflow import Compression

Arr: TypeAlias = npt.NDArray[Any]

SIZE = int(os.environ.get("HOROVOD_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"])
NODES = SIZE // int(os.environ.get("HOROVOD_LOCAL_SIZE") or os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
EVEN, ODD = hvd.ProcessSet(range(0, SIZE, 2)), hvd.ProcessSet(range(1, SIZE, 2))

LOSSLESS = ["topk:ratio=1.0", "randomk:ratio=1.0", "powersgd:rank=64,min_gain=0,min_size=0"]
"""Specs of methods that can be told not to lose anything."""

LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_model() -> Any:
    """The same weights on all ranks."""
    init = [tf.keras.initializers.GlorotUniform(seed=seed) for seed in range(3)]
    layers = [
        tf.keras.layers.Dense(48, activation="relu", kernel_initializer=init[0], input_shape=(32,)),
        tf.keras.layers.Dense(64, activation="relu", kernel_initializer=init[1]),
        tf.keras.layers.Dense(10, kernel_initializer=init[2]),
    ]
    return tf.keras.Sequential(layers)


def small_model(*units: int) -> Any:
    """As `make_model`; by default one variable, as what is traced takes as long as it has variables."""
    *hidden, last = units or (40,)
    init = [tf.keras.initializers.GlorotUniform(seed=seed) for seed in range(len(hidden) + 1)]
    layers = [
        tf.keras.layers.Dense(width, "relu", kernel_initializer=i) for width, i in zip(hidden, init, strict=False)
    ]
    layers.append(tf.keras.layers.Dense(last, use_bias=False, kernel_initializer=init[-1]))
    return tf.keras.Sequential([tf.keras.Input((32,)), *layers])


def batches(steps: range | int) -> tuple[Arr, Arr]:
    """Batches of 16, others for each rank and step."""
    numbers = range(steps) if isinstance(steps, int) else steps
    xs = [np.random.default_rng([hvd.rank(), step]).standard_normal((16, 32)) for step in numbers]
    x = np.concatenate(xs).astype(np.float32)
    return x, x[:, :10].argmax(1)


def weights(model: Any) -> Arr:
    """All parameters, flat."""
    return np.concatenate([variable.numpy().ravel() for variable in model.trainable_variables])


def make(compression: str | Any) -> Any:
    """A compressor of its spec."""
    return Compression.parse(compression) if isinstance(compression, str) else compression


def fit(
    compression: str | Any,
    steps: int = 8,
    eager: bool = False,
    model: Any = None,
    lr: float = 0.1,
    kind: Any = tf.keras.optimizers.SGD,
    distribute: Any = hvd_keras.DistributedOptimizer,
    **options: Any,
) -> Any:
    """Train with Keras `fit`; gives the model."""
    model = make_model() if model is None else model
    optimizer = distribute(kind(lr, momentum=0.9), compression=make(compression), **options)
    model.compile(optimizer=optimizer, loss=LOSS, run_eagerly=eager)
    x, y = batches(steps)
    model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    return model


class Tape:
    """A custom loop with `DistributedGradientTape`.

    Args:
        compression: A compressor or its spec.
        function: What the step is wrapped in, `tf.function` or nothing.
        model: The model.
        lr: Learning rate of SGD with momentum.
        loss: Gives the loss of the model on a batch.
        **options: Of the tape.
    """

    def __init__(
        self,
        compression: str | Any,
        function: Callable[[Any], Any] = tf.function,
        model: Any = None,
        lr: float = 0.1,
        loss: Callable[[Any, Any, Any], Any] = lambda model, x, y: LOSS(y, model(x)),
        **options: Any,
    ) -> None:
        self.model = make_model() if model is None else model
        self.compression = make(compression)
        self.optimizer = tf.keras.optimizers.SGD(lr, momentum=0.9)
        self.optimizer.build(self.model.trainable_variables)
        self._loss = loss
        self._options = options
        self._step = function(self._gradients)

    def _gradients(self, x: Any, y: Any, factor: Any) -> Any:
        with tf.GradientTape() as tape:
            value = self._loss(self.model, x, y) * factor
        tape = hvd.DistributedGradientTape(tape, compression=self.compression, **self._options)
        return tape.gradient(value, self.model.trainable_variables)

    def gradients(self, step: int, factor: float = 1.0) -> list[Any]:
        """What all ranks agree on in a step; the loss is multiplied by a factor."""
        x, y = batches(range(step, step + 1))
        gradients: list[Any] = self._step(tf.constant(x), tf.constant(y), tf.constant(factor))
        return gradients

    def run(self, steps: range | int) -> Tape:
        """Train."""
        for step in range(steps) if isinstance(steps, int) else steps:
            self.optimizer.apply_gradients(zip(self.gradients(step), self.model.trainable_variables, strict=True))
        return self

    @property
    def weights(self) -> Arr:
        """All parameters, flat."""
        return weights(self.model)


@functools.cache
def trained_fit() -> tuple[Any, Any]:
    """A small model after 8 steps of `fit`, which other ways are compared with, and its compressor."""
    compression = Compression.topk(ratio=0.05)
    return fit(compression, model=small_model()), compression


def assert_same_state(compression: Any, other: Any) -> None:
    """The same variables, bit for bit."""
    state, expected = state_of(compression), state_of(other)
    assert state.keys() == expected.keys()
    for path, leaf in state.items():
        np.testing.assert_array_equal(leaf, expected[path], err_msg=path)


def state_of(compression: Any) -> dict[str, Arr]:
    """A compressor's state, as copies."""
    return {
        f"{name}.{key}.{path}": np.asarray(leaf)
        for name, session in compression.sessions.items()
        for key, leaves in session.saved().buckets.items()
        for path, leaf in leaves.items()
    }


def everyone(value: object, process_set: Any = hvd.global_process_set) -> list[Any]:
    """The values of all ranks."""
    gathered: list[Any] = hvd.allgather_object(value, process_set=process_set)
    return gathered


def assert_ranks_equal(array: Arr, process_set: Any = hvd.global_process_set) -> None:
    """All ranks hold the same bits."""
    for other in hvd.allgather(array[None], process_set=process_set).numpy():
        np.testing.assert_array_equal(other, array)
