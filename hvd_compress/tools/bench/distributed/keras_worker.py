"""A rank of a measurement in Keras: ``python -m hvd_compress.tools.bench.distributed.keras_worker TASK``.

Each entry has a model of its own and is trained by ``train_on_batch``. What happens in the graph cannot be told apart,
so there are no times of phases.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.engine.stats import Stats
from hvd_compress.keras import Compression
from hvd_compress.tools.bench.distributed.measuring import measure
from hvd_compress.tools.bench.distributed.shapes import BLOCKS_OF_MLP, CLASSES, DEPTH, NARROW, WIDTH, many
from hvd_compress.tools.bench.distributed.task import Entry, Task
from hvd_compress.tools.ranks.keras import KerasRank
from hvd_compress.tools.ranks.process import Device

BATCH = 32
IMAGES, SIDE = 4, 64
RATE = 1e-3


@dataclass
class KerasSubject:
    model: Any
    batch: tuple[Any, Any]
    compression: Any

    @property
    def called(self) -> float | None:
        return None

    def step(self) -> float:
        begin = time.perf_counter()
        self.model.train_on_batch(*self.batch)
        return time.perf_counter() - begin

    def release(self) -> None:
        """Do nothing: gradients live within the step."""

    def stats(self) -> Stats | None:
        return self.compression.stats() if hasattr(self.compression, "stats") else None


class KerasBench(KerasRank):
    def __init__(self, specs: Sequence[str], device: Device) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        super().__init__(specs, device)

    def make(self, entry: Entry, what: str, model: str) -> KerasSubject:
        built, loss, batch = MODELS[model](np.random.default_rng(self.rank))
        optimizer, compression = tf.keras.optimizers.SGD(RATE), entry.compression(Compression, hvd.Compression)
        if compression is not None:
            optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
        built.compile(optimizer, loss=loss)
        return KerasSubject(built, tuple(map(tf.constant, batch)), compression)


Made = tuple[Any, Any, tuple[Any, Any]]


def _crossentropy() -> Any:
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def linear(rng: np.random.Generator) -> Made:
    layers = [tf.keras.layers.Dense(WIDTH, "relu") for _ in range(DEPTH)]
    model = tf.keras.Sequential([*layers, tf.keras.layers.Dense(CLASSES)])
    model.build((None, WIDTH))
    return model, _crossentropy(), (rng.standard_normal((BATCH, WIDTH), np.float32), rng.integers(CLASSES, size=BATCH))


def mlp(rng: np.random.Generator) -> Made:
    blocks = [
        [tf.keras.layers.Dense(NARROW, use_bias=False), tf.keras.layers.LayerNormalization(), tf.keras.layers.ReLU()]
        for _ in range(BLOCKS_OF_MLP)
    ]
    model = tf.keras.Sequential([layer for block in blocks for layer in block])
    model.build((None, NARROW))
    return model, _crossentropy(), (rng.standard_normal((BATCH, NARROW), np.float32), rng.integers(CLASSES, size=BATCH))


def resnet50(rng: np.random.Generator) -> Made:
    """Return Keras' ResNet-50, whose convolutions have biases."""
    model = tf.keras.applications.ResNet50(weights=None, input_shape=(SIDE, SIDE, 3), classifier_activation=None)
    images = rng.standard_normal((IMAGES, SIDE, SIDE, 3), np.float32)
    return model, _crossentropy(), (images, rng.integers(1000, size=IMAGES))


def small(rng: np.random.Generator) -> Made:
    model = tf.keras.Sequential([tf.keras.layers.Dense(64)])
    model.build((None, 64))
    return model, "mse", (rng.standard_normal((BATCH, 64), np.float32), np.zeros((BATCH, 64), np.float32))


def matrices(rng: np.random.Generator) -> Made:
    """Return a model of many small matrices; the gradient of each is the input."""
    shape = many()[0]
    inputs = tf.keras.Input(shape)
    model = tf.keras.Model(inputs, _matrices_layer()(inputs))
    return model, lambda _, output: output, (rng.standard_normal((1, *shape), np.float32), np.zeros((1, 1), np.float32))


def _matrices_layer() -> Any:
    class Matrices(tf.keras.layers.Layer):  # type: ignore[misc]
        def build(self, _: Any) -> None:
            self.matrices = [self.add_weight(f"w{i}", shape) for i, shape in enumerate(many())]

        def call(self, inputs: Any) -> Any:
            return tf.add_n([tf.reduce_sum(inputs * matrix, (1, 2)) for matrix in self.matrices])

    return Matrices()


MODELS: dict[str, Callable[[np.random.Generator], Made]] = {
    "linear": linear,
    "mlp": mlp,
    "resnet50": resnet50,
    "many": matrices,
    "small": small,
}


if __name__ == "__main__":
    measure(Task.from_json(sys.argv[1]), KerasBench)
