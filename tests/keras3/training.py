"""A small model of Keras 3, its training over the ranks and by hand, and questions to all ranks."""

from __future__ import annotations

from typing import Any, TypeAlias

import horovod.tensorflow as hvd
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_compress.keras import Compression, DistributedOptimizer

Arr: TypeAlias = npt.NDArray[Any]

keras = tf.keras
ALONE = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_model(**options: Any) -> Any:
    """The same weights on all ranks."""
    init = [keras.initializers.GlorotUniform(seed=seed) for seed in range(2)]
    layers = [
        keras.Input((32,)),
        keras.layers.Dense(64, activation="relu", kernel_initializer=init[0], **options),
        keras.layers.Dense(10, kernel_initializer=init[1], **options),
    ]
    return keras.Sequential(layers)


def batches(steps: range | int, rank: int | None = None) -> tuple[Arr, Arr]:
    """Batches of 16, others for each rank and step."""
    numbers = range(steps) if isinstance(steps, int) else steps
    rank = hvd.rank() if rank is None else rank
    xs = [np.random.default_rng([rank, step]).standard_normal((16, 32)) for step in numbers]
    x = np.concatenate(xs).astype(np.float32)
    return x, x[:, :10].argmax(1)


def weights(model: Any) -> Arr:
    """All parameters, flat."""
    return np.concatenate([variable.numpy().ravel() for variable in model.trainable_variables])


def sgd(**options: Any) -> Any:
    """SGD with momentum."""
    return keras.optimizers.SGD(0.1, momentum=0.9, **options)


def make(compression: Any) -> Any:
    """A compressor of its spec."""
    return Compression.parse(compression) if isinstance(compression, str) else compression


def fit(
    compression: Any,
    steps: range | int = 6,
    optimizer: Any = None,
    model: Any = None,
    eager: bool = False,
    **options: Any,
) -> Any:
    """Train with `fit`; gives the model."""
    model = make_model() if model is None else model
    plain = sgd() if optimizer is None else optimizer
    distributed = DistributedOptimizer(plain, compression=make(compression), **options)
    model.compile(optimizer=distributed, loss=LOSS, run_eagerly=eager)
    return go_on(model, steps)


def go_on(model: Any, steps: range | int) -> Any:
    """Train a compiled model."""
    x, y = batches(steps)
    model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
    return model


def by_hand(steps: range | int = 6, ranks: tuple[int, ...] = (0, 1), optimizer: Any = None, model: Any = None) -> Arr:
    """The weights after training on the means of the gradients of ranks, without Horovod."""
    model = make_model() if model is None else model
    plain = sgd() if optimizer is None else optimizer

    @tf.function  # type: ignore[untyped-decorator]
    def gradients(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x))
        return tape.gradient(loss, model.trainable_variables)

    for step in range(steps) if isinstance(steps, int) else steps:
        of_ranks = [gradients(*map(tf.constant, batches(range(step, step + 1), rank))) for rank in ranks]
        means = [tf.add_n(list(parts)) / len(ranks) for parts in zip(*of_ranks, strict=True)]
        plain.apply_gradients(zip(means, model.trainable_variables, strict=True))
    return weights(model)


def state_of(compression: Any) -> dict[str, Arr]:
    """A compressor's state, as copies."""
    return {
        f"{name}.{key}.{path}": np.asarray(leaf)
        for name, session in compression.sessions.items()
        for key, leaves in session.saved().buckets.items()
        for path, leaf in leaves.items()
    }


def everyone(value: object) -> list[Any]:
    """The values of all ranks."""
    gathered: list[Any] = hvd.allgather_object(value)
    return gathered


def assert_ranks_equal(array: Arr) -> None:
    """All ranks hold the same bits."""
    for other in hvd.allgather(array[None]).numpy():
        np.testing.assert_array_equal(other, array)
