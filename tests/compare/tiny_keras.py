"""A task that is done in no time, in Keras: to tell the last digit of the first of six numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress.lab import Setting, Training

WORDS, LENGTH, WIDTH, COUNT, STEP = 40, 6, 8, 256, 32
PARAMETERS = WORDS * WIDTH + LENGTH * WIDTH * 10 + 10


def build(setting: Setting) -> Training:
    """An embedding, whose gradient is sparse, and a layer; gradients are clipped, and the metric is the loss."""
    rng = np.random.default_rng(0)
    x = rng.integers(WORDS, size=(COUNT, LENGTH))
    y = x[:, 0] % 10
    layers = [tf.keras.layers.Embedding(WORDS, WIDTH), tf.keras.layers.Flatten(), tf.keras.layers.Dense(10)]
    model = tf.keras.Sequential([tf.keras.Input((LENGTH,)), *layers])
    optimizer = tf.keras.optimizers.SGD(setting.lr or 2.0, momentum=0.9 if setting.momentum else 0.0)

    def batches(epoch: int) -> list[Any]:
        order = np.random.default_rng((setting.seed, epoch)).permutation(COUNT)
        return [
            (tf.constant(x[chosen]), tf.constant(y[chosen]))
            for chosen in (order[i + setting.rank : i + STEP : setting.size] for i in range(0, COUNT, STEP))
        ]

    def loss(model: Any, batch: Any) -> Any:
        losses = tf.keras.losses.sparse_categorical_crossentropy(batch[1], model(batch[0]), from_logits=True)
        return tf.reduce_mean(losses)

    def evaluate(model: Any) -> float:
        return float(loss(model, (tf.constant(x), tf.constant(y))))

    return Training(
        model, optimizer, batches, loss, evaluate, metric="loss", higher_is_better=False, epochs=2, every=4, clip=0.1,
        schedule=lambda part: 1 - part,
    )  # fmt: skip


def stubborn(setting: Setting) -> Training:
    """The same with momentum, whatever it is told."""
    return build(setting._replace(momentum=True))
