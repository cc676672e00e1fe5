"""Reduces gradients in an optimizer of Keras 3, with what Horovod makes public: its gradient tape."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow.compression import Compressor

from hvd_compress.errors import UnsupportedError
from hvd_compress.tensorflow import TensorFlowCompressor
from hvd_compress.tensorflow.caller import owners

Gradient: TypeAlias = Any

keras: Any = importlib.import_module("keras")  # which has no types, and shares its name with examples/keras


class _Given(tf.GradientTape):  # type: ignore[misc]  # TensorFlow is not typed
    """Has nothing recorded: the gradients are given in the place of the target."""

    def gradient(self, target: list[Gradient], *_: Any) -> list[Gradient]:
        return target


class _Apart(Compressor):  # type: ignore[misc]  # Horovod is not typed
    """A compressor for one optimizer alone.

    Horovod keeps what it has traced by compressor, and TensorFlow what has variables of the same shapes, so that two
    models would share what is kept between steps.
    """

    def __init__(self, compression: Any) -> None:
        self.compress, self.decompress = compression.compress, compression.decompress


class Reducer:
    """Reduces gradients over the ranks. Not a Keras object, so it is neither tracked nor saved with an optimizer.

    Args:
        options: Options of `horovod.tensorflow.DistributedGradientTape`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        compression = options["compression"]
        self._tape = hvd.DistributedGradientTape(_Given(), **{**options, "compression": _Apart(compression)})
        # What has a state must see gradients in one unit, whatever the scale; in 16 bits, the scaled ones are safer.
        self._unscale = isinstance(compression, TensorFlowCompressor) and not compression.method.linear

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def reduce(self, gradients: Sequence[Gradient], variables: Sequence[Any], scale: Any) -> list[Gradient]:
        """Build the reduction.

        Args:
            gradients: One for each variable; some may be None.
            variables: Variables of Keras or TensorFlow.
            scale: Loss scale.
        """
        _refuse_xla()
        sources = [v if isinstance(v, tf.Variable) else v.value for v in variables]
        if not self._unscale or (isinstance(scale, float) and scale == 1.0):
            reduced: list[Gradient] = self._tape.gradient(list(gradients), sources)
            return reduced
        unscaled = [_map(gradient, lambda x: x / tf.cast(scale, x.dtype)) for gradient in gradients]
        return [_map(g, lambda x: x * tf.cast(scale, x.dtype)) for g in self._tape.gradient(unscaled, sources)]


class Distributed:
    """Return the class of a distributed optimizer: these methods and those of the Keras 3 optimizer."""

    _hvd_compress: Reducer

    def build(self, variables: Any) -> None:
        """Make the variables of the optimizer."""
        builder = sys._getframe(1).f_locals.get("self")
        if builder is not self and isinstance(builder, keras.optimizers.LossScaleOptimizer):
            raise UnsupportedError(
                "LossScaleOptimizer is around DistributedOptimizer, where ranks would wait for those that skip a step:"
                " use DistributedOptimizer(LossScaleOptimizer(optimizer), ...); under the policy mixed_float16,"
                " model.compile puts a LossScaleOptimizer around any optimizer that is none"
            )
        super().build(variables)  # type: ignore[misc]

    def apply(self, grads: Sequence[Gradient], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce gradients and apply them."""
        optimizer: Any = self
        variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
        reduced = self._hvd_compress.reduce(grads, variables, optimizer.scale_loss(1.0))
        super().apply(reduced, trainable_variables)  # type: ignore[misc]


def wrap(optimizer: Any, options: dict[str, Any]) -> Any:
    """Make an optimizer reduce its gradients.

    Its class is exchanged: an optimizer made anew, as Horovod does on Keras 2, would have forgotten its state, and not
    all can be made of their configuration.

    Args:
        optimizer: A Keras 3 optimizer.
        options: Options of `horovod.tensorflow.DistributedGradientTape`.

    Raises:
        UnsupportedError: If it does so already.
    """
    if issubclass(type(optimizer), Distributed):
        raise UnsupportedError(f"{optimizer.name!r} is distributed already: call DistributedOptimizer once")
    plain = type(optimizer)
    optimizer._hvd_compress = Reducer(options)
    # Keras writes __class__ into saved models, which are to be loaded with or without this package.
    optimizer.__class__ = type(plain.__name__, (Distributed, plain), {"__class__": property(lambda _: plain)})
    return optimizer


def _map(gradient: Gradient, change: Any) -> Gradient:
    """Change the values of a gradient of any kind."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return None if gradient is None else change(gradient)


def _refuse_xla() -> None:
    """Refuse a graph that will be compiled: Keras does so by default where there is a GPU.

    Raises:
        UnsupportedError: If a model or a function on the stack has been told to.
    """
    for _, owner in owners(None if tf.executing_eagerly() else sys._getframe(1)):
        if getattr(owner, "_jit_compile", None) is True:
            raise UnsupportedError(
                "XLA (jit_compile) cannot compile Horovod's operations: use model.compile(..., jit_compile=False), or"
                " tf.function without jit_compile; 'auto', Keras's default, means True where there is a GPU"
            )
