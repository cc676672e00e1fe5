"""Images to classify, in Keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow import keras

from hvd_compress.tools.compare.tasks.classifying import Batch, Classifying
from hvd_compress.tools.compare.tasks.data import Arr


class _Classifying(Classifying):
    def cnn(self, side: int, pools: tuple[bool, bool], hidden: int) -> Any:
        layers = [keras.Input((side, side, 1))]
        for filters, pool in ((32, pools[0]), (64, pools[1])):
            layers += [keras.layers.Conv2D(filters, 3, padding="same", activation="relu")]
            layers += [keras.layers.MaxPooling2D(2)] if pool else []
        dense = [keras.layers.Dense(hidden, activation="relu"), keras.layers.Dense(10)]
        return keras.Sequential([*layers, keras.layers.Flatten(), *dense])

    def sgd(self, model: Any, lr: float, momentum: float) -> Any:
        return keras.optimizers.SGD(lr, momentum=momentum)

    def loss(self, model: Any, batch: Batch) -> Any:
        inputs, labels = batch
        losses = keras.losses.sparse_categorical_crossentropy(labels, model(inputs, training=True), from_logits=True)
        return tf.reduce_mean(losses)

    def tensor(self, array: Arr) -> Any:
        return tf.constant(array)

    def inputs(self, pixels: Arr) -> Any:
        return self.tensor(pixels[..., None])

    def logits(self, model: Any, inputs: Any) -> Arr:
        found: Arr = model(inputs, training=False).numpy()
        return found


digits, fashion = _Classifying.digits, _Classifying.fashion
