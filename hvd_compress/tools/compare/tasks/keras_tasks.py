"""Images to classify, in Keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow import keras

from hvd_compress.tools.compare.tasks import data
from hvd_compress.tools.compare.tasks.classifying import Classifying
from hvd_compress.tools.compare.tasks.data import SIDE, Arr
from hvd_compress.tools.compare.tasks.options import FashionOptions, NoOptions, read, share_of
from hvd_compress.tools.compare.training import Setting, Training

Tensor = Any
Batch = tuple[Tensor, Tensor]


def digits(setting: Setting) -> Training:
    """The CNN of ``examples/keras/digits.py``, 32 images in each step of a rank."""
    read(NoOptions, "digits", setting.options)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    lr = 0.1 if setting.lr is None else setting.lr
    optimizer = keras.optimizers.SGD(lr, momentum=0.8 if setting.momentum else 0.0)
    task = _Classifying(data.digits(), setting, batch=32)
    return Training(model, optimizer, task.batches, loss, task.evaluate, target=0.95, epochs=8, every=10)


def fashion(setting: Setting) -> Training:
    """A CNN of 3.2 million parameters on Fashion-MNIST; see `FashionOptions`."""
    options = read(FashionOptions, "fashion", setting.options)
    model = keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(1024, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    lr = 0.05 if setting.lr is None else setting.lr
    optimizer = keras.optimizers.SGD(lr, momentum=0.9 if setting.momentum else 0.0)
    task = _Classifying(data.fashion(setting.data), setting, share_of(options.batch, setting), options.test)
    return Training(model, optimizer, task.batches, loss, task.evaluate, target=0.85, epochs=2, every=10)


class _Classifying(Classifying):
    """With tensors of TensorFlow."""

    def tensor(self, array: Arr) -> Tensor:
        return tf.constant(array)

    def inputs(self, pixels: Arr) -> Tensor:
        return self.tensor(pixels[..., None])

    def logits(self, model: Any, inputs: Tensor) -> Arr:
        found: Arr = model(inputs, training=False).numpy()
        return found


def loss(model: Any, batch: Batch) -> Tensor:
    """The cross entropy."""
    inputs, labels = batch
    losses = keras.losses.sparse_categorical_crossentropy(labels, model(inputs, training=True), from_logits=True)
    return tf.reduce_mean(losses)
