"""One rank of a job with faults, in TensorFlow, with models of Keras."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from soak.schedules.diary import Arr, Part
from soak.schedules.rank import Incidents, Order, main

from hvd_compress.keras import Compression

LR = 0.05


class KerasTrainer:
    """A trunk with a head, and a second head that is reduced by a tape of its own.

    Args:
        spec: Of the compression.
        merge: How gradients are put into buckets.
    """

    lost: tuple[type[Exception], ...] = (HorovodInternalError, tf.errors.OpError)

    def __init__(self, spec: str, merge: int | str) -> None:
        self.models = {"first": make_model(16, 24, 8), "second": make_model(8, 20, 4)}
        draw = np.random.default_rng(0)
        self.put([draw.standard_normal(weight.shape) / 4 for weight in self.weights()])
        self.compression: Any = Compression.parse(spec, merge=merge)
        self.parts = ["first"]
        self.incidents: Incidents | None = None
        self.renew()

    def variables(self, part: str) -> list[Any]:
        found: list[Any] = self.models[part].trainable_variables
        return found

    def weights(self) -> list[Arr]:
        return [v.numpy() for part in self.models for v in self.variables(part)]

    def put(self, weights: list[Arr]) -> None:
        for variable, weight in zip([v for part in self.models for v in self.variables(part)], weights, strict=True):
            variable.assign(weight)

    def leaves(self) -> dict[str, Arr]:
        return {
            f"{name}/{key}/{path}": np.asarray(leaf)
            for name, session in self.compression.sessions.items()
            for key, leaves in session.saved().buckets.items()
            for path, leaf in leaves.items()
        }

    def join(self) -> None:
        self.parts.append("second")
        self.renew()

    def renew(self) -> None:
        self.optimizers = {part: tf.keras.optimizers.legacy.SGD(LR) for part in self.parts}
        self.reduced = tf.function(self._gradients, autograph=False)

    def _gradients(
        self, x: Any, masks: dict[str, list[Any]], second: Any, batch: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Gradients of this rank and of all, by part; the masks are added to them."""
        with tf.GradientTape(persistent=True) as tape:
            hidden = self._passing(self.models["first"](x))
            loss = tf.reduce_mean(hidden**2) + tf.reduce_mean(hidden)
            if "second" in self.parts:
                loss += second * tf.reduce_mean((self.models["second"](hidden) - 1) ** 2)
            loss *= batch
            for part in self.parts:
                for variable, mask in zip(self.variables(part), masks[part], strict=True):
                    loss += tf.reduce_sum(variable * mask)
        tapes = {part: hvd.DistributedGradientTape(tape, compression=self.compression) for part in self.parts}
        local = {part: tape.gradient(loss, self.variables(part)) for part in self.parts}
        return local, {part: tapes[part].gradient(loss, self.variables(part)) for part in self.parts}

    def _passing(self, x: Any) -> Any:
        """Something happens in the backward pass."""

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def passing(x: Any) -> Any:
            def gradient(upstream: Any) -> Any:
                with tf.control_dependencies([tf.numpy_function(self._happen, [], tf.int64)]):
                    return tf.identity(upstream)

            return tf.identity(x), gradient

        return passing(x)

    def _happen(self) -> Any:
        """What happens inside, once in a step."""
        incidents, self.incidents = self.incidents, None
        if incidents is not None:
            incidents.inside()
        return np.int64(0)

    def step(self, incidents: Incidents) -> dict[str, Part]:
        self.incidents = incidents
        draw = np.random.default_rng([incidents.step, hvd.rank()])
        x = tf.constant(draw.standard_normal((6, 16)), tf.float32)
        masks = {part: self._masks(part, incidents) for part in self.parts}
        local, mean = self.reduced(x, masks, tf.constant(float(incidents.second)), tf.constant(float(incidents.batch)))
        return {part: self._apply(part, local[part], mean[part]) for part in self.parts}

    def _apply(self, part: str, local: list[Any], mean: list[Any]) -> Part:
        """Apply the gradients of a part, if they are finite."""
        told = Part.of([g.numpy() for g in local], [g.numpy() for g in mean], False, hvd.size())
        if told.counts:
            self.optimizers[part].apply_gradients(zip(mean, self.variables(part), strict=True))
        return told

    def _masks(self, part: str, incidents: Incidents) -> list[Any]:
        """What is added to each gradient of a part."""
        (value, number), variables = incidents.poison, self.variables(part)
        masks = [np.zeros(variable.shape, np.float32) for variable in variables]
        if value and (number % 2 or part == "first"):
            chosen = masks[number // 2 % len(masks)]
            chosen.flat[number % chosen.size] = value
        return [tf.constant(mask) for mask in masks]

    def close(self) -> None:
        hvd.shutdown()


def make_model(inputs: int, hidden: int, outputs: int) -> Any:
    """A small network."""
    layers = [tf.keras.layers.Dense(hidden, activation="tanh"), tf.keras.layers.Dense(outputs)]
    model = tf.keras.Sequential(layers)
    model.build((None, inputs))
    return model


def init() -> None:
    """Join the job."""
    hvd.init()


def run(order: Order) -> None:
    """Be a rank."""
    main(order, KerasTrainer, init)
