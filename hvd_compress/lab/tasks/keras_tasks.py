"""Images to classify, in Keras."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

from hvd_compress.lab.tasks import data
from hvd_compress.lab.tasks.data import SIDE, Arr, Images
from hvd_compress.lab.tasks.options import FashionOptions, NoOptions, read, share_of
from hvd_compress.lab.training import Setting, Training

Tensor = Any
Batch = tuple[Tensor, Tensor]

_CHUNK = 100
"""Images that are evaluated at once."""


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


class _Classifying:
    """The data of a rank."""

    def __init__(self, images: Images, setting: Setting, batch: int, test: int | None = None) -> None:
        data.check_count(len(images.train), batch, setting)
        self._images, self._setting, self._batch = images, setting, batch
        self._test, self._test_labels = images.test_share(setting, test)

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Of this rank."""
        train, labels = self._images.train, self._images.train_labels
        for chosen in data.deal(len(train), self._batch, self._setting, epoch):
            yield self._inputs(train[chosen]), tf.constant(labels[chosen])

    def evaluate(self, model: Any) -> float:
        """The fraction that is right."""
        right = 0
        for begin in range(0, len(self._test), _CHUNK):
            outputs = model(self._inputs(self._test[begin : begin + _CHUNK]), training=False).numpy()
            right += int((np.argmax(outputs, 1) == self._test_labels[begin : begin + _CHUNK]).sum())
        return right / len(self._test)

    def _inputs(self, pixels: Arr) -> Tensor:
        return tf.constant(self._images.scaled(pixels)[..., None])


def loss(model: Any, batch: Batch) -> Tensor:
    """The cross entropy."""
    inputs, labels = batch
    losses = keras.losses.sparse_categorical_crossentropy(labels, model(inputs, training=True), from_logits=True)
    return tf.reduce_mean(losses)
