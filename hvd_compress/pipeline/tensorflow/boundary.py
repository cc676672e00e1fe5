"""A boundary inside one process: a Keras layer with a gradient of its own, which compresses both ways."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_compress.core.method import Method
from hvd_compress.engine.stats import Meter
from hvd_compress.ops.numpy_compiled import NumpyCompiledOps
from hvd_compress.pipeline import wire
from hvd_compress.pipeline.settings import Memory, Settings
from hvd_compress.pipeline.streams import Call, check_carried, streams
from hvd_compress.pipeline.traffic import BoundaryStats, Traffic, count

Tensor: TypeAlias = Any
Arr: TypeAlias = npt.NDArray[Any]

_FIRST, _AGAIN = "inner", "inner_recompute_grad"
"""The functions of TensorFlow that compute what ``tf.recompute_grad`` wraps, forward and in the backward pass."""


@tf.keras.utils.register_keras_serializable(package="hvd_compress")
class CompressedBoundary(tf.keras.layers.Layer):  # type: ignore[misc]  # Keras is not typed
    """Compresses the messages between two stages of a model: activations forward, gradients back.

    The output is what the next stage would receive, and back goes what this stage would. Compression itself counts as
    the identity for gradients (straight-through)::

        y = D(C_f(x))                  dL/dx = D(C_b(dL/dy))

    Rudakov, Beznosikov, Kholodov, Gasnikov, Activations and Gradients Compression for Model-Parallel Training, 2024.

    It compresses on the CPU, with the code and the bits of the boundary in PyTorch, and what it remembers is in this
    process. So it works eagerly, in a ``tf.function`` and in ``fit``, with minibatches of any size, but not with
    ``jit_compile=True``, in a model exported as SavedModel, or under a ``tf.distribute`` strategy with several replicas
    in one process, which would share a memory. In a file of ``model.save("model.keras")`` the memory is left out.
    It has no second derivative.

    With ``tf.recompute_grad``, wrap the layers before and behind it separately. Recomputed layers may contain a
    boundary only if it gives the same result each time, such as ``topk`` without a memory; others are an error.

    Args:
        forward: Operator of activations, such as ``"topk:ratio=0.1"``; see ``hvd_compress.pipeline.OPERATORS``.
        backward: Operator of gradients; or ``"shared"``, which sends gradients where the activation that arrived is
            not zero.
        memory: ``"none"``; ``"ef"``: add the residual to the next message; ``"ef21"``: send the difference from the
            state of the message before at the other end; ``"aqsgd:samples=n"``: send the change of a sample's
            activation (see ``hvd_compress.pipeline.AQSGD``). Or a pair: for activations, and for gradients.
            Uncompressed messages have no memory.
        inference: Whether activations are also compressed outside training, always without a memory.
        **kwargs: Of a Keras layer. ``name`` is part of the seeds of random operators: give one, as those that Keras
            makes up depend on the layers that there were before.

    Raises:
        SpecError: If an operator or a memory is not known, not allowed, or not supported with the others.
    """

    supports_jit = False
    """Tells Keras 3, which compiles by XLA what it may."""

    def __init__(
        self,
        forward: str | Method = "none",
        backward: str | Method = "none",
        memory: Memory | tuple[Memory, Memory] = "none",
        inference: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(autocast=False, **kwargs)  # activations keep their dtype
        memory = tuple(memory) if isinstance(memory, list) else memory  # what JSON makes of a pair
        self.supports_masking = True
        self.settings = Settings.of(forward, backward, memory, inference)
        self._streams = streams(self.settings, self.name)
        self._meters = Meter(), Meter()

    def call(self, inputs: Tensor, ids: Tensor | None = None, training: Any = None) -> Tensor:
        """Return the activations that the next stage receives.

        Args:
            inputs: Activations, floating-point; the first axis is that of samples. Or ``[activations, ids]``.
            ids: Ids of the samples, whole numbers of shape (samples,), with a memory of ``aqsgd`` in training. As an
                input of a model: ``tf.keras.Input((), dtype="int64")``.
            training: Whether memories are used. Keras knows in ``fit``, ``evaluate`` and ``predict``; in a loop of your
                own, write ``model(x, training=True)``.

        Returns:
            Shape and dtype of the activations.

        Raises:
            BoundaryError: If activations or ids are not allowed or do not fit the last ones, or if recomputation gives
                other activations. Errors that show only when a graph is run, such as another size of minibatch with
                a memory of ``ef``, end the step with a ``tf.errors.UnknownError`` that has this message.
        """
        x, ids = inputs if isinstance(inputs, list | tuple) else (inputs, ids)
        x = tf.convert_to_tensor(x)
        check_carried(x.dtype.name, (None,) if x.shape.rank is None else x.shape.as_list())
        training = tf.cast(False if training is None else training, tf.bool)
        recomputed = _recomputed()

        def cross(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
            y = self._forth(x, training, ids, recomputed)
            # The mask is read off y, so that calls which are under way at one time cannot mistake each other's.
            return y, lambda gradient: self._back(tf.convert_to_tensor(gradient), training, y)

        return tf.custom_gradient(cross)(x)

    def _forth(self, x: Tensor, training: Tensor, ids: Tensor | None, recomputed: str) -> Tensor:
        dtype = x.dtype.name

        def run(x: Arr, training: Any, *ids: Arr) -> Arr:
            call = Call(x.shape, dtype, bool(training), *ids)
            if recomputed:
                self._streams[0].check_again(NumpyCompiledOps(), call)
            return self._carry(x, 0, call, counts=recomputed != _AGAIN)

        return _on_host(run, x, training, *([] if ids is None else [ids]))

    def _back(self, gradient: Tensor, training: Tensor, y: Tensor) -> Tensor:
        dtype = gradient.dtype.name

        def run(gradient: Arr, training: Any, *y: Arr) -> Arr:
            mask = np.flatnonzero(*y) if y else None
            return self._carry(gradient, 1, Call(gradient.shape, dtype, bool(training)), mask)

        return _on_host(run, gradient, training, *([_wide(y)] if self.settings.shares_mask else []))

    def _carry(self, x: Arr, direction: int, call: Call, mask: Arr | None = None, counts: bool = True) -> Arr:
        """Return the message as it arrives at the other end.

        Args:
            x: Activations or gradients, in the precision of the call.
            direction: 0 forward, 1 back.
            call: Facts that the other end knows, too.
            mask: Mask of the activations, if gradients share it.
            counts: Whether to count the message; recomputed ones have been counted.
        """
        check_carried(call.dtype, x.shape)
        meter = self._meters[direction]
        with meter.time("encode"):
            # A copy, as encoding may overwrite what here is the memory of a tensor.
            sent = self._streams[direction].encode(NumpyCompiledOps(), x.flatten(), call, mask)
        if counts:
            count(meter, call, wire.size(sent.payload.size, call.ids))
        arrived: Arr = sent.decoded.reshape(call.shape)
        return arrived

    def stats(self) -> BoundaryStats:
        """Return the traffic between the two stages in training so far."""
        return BoundaryStats(*(Traffic.of(meter) for meter in self._meters))

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of an equal layer, without its state. Operators are specs."""
        config: dict[str, Any] = super().get_config()
        return config | self.settings.specs()


def _recomputed() -> str:
    """Return which pass of ``tf.recompute_grad`` calls: `_FIRST` (forward), `_AGAIN` (recomputation), or none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in (_FIRST, _AGAIN) and "current_var_scope" in (*code.co_cellvars, *code.co_freevars):
            return code.co_name
        frame = frame.f_back
    return ""


def _on_host(function: Callable[..., Arr], x: Tensor, *more: Tensor) -> Tensor:
    """Apply a function of numpy arrays to a tensor: shape and dtype of ``x``.

    In a graph such calls have effects, so each is run once, in the order of the program.
    """
    wide = _wide(x)
    y = tf.numpy_function(function, [wide, *more], wide.dtype)
    return tf.cast(tf.ensure_shape(y, x.shape), x.dtype)


def _wide(x: Tensor) -> Tensor:
    """Return a tensor in the precision of the computation."""
    return x if x.dtype == tf.float64 else tf.cast(x, tf.float32)
