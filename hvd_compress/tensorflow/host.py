"""Calls of Python functions on numpy arrays, from graphs and in eager mode."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy.typing as npt
import tensorflow as tf

from hvd_compress.errors import CompressionError

Tensor: TypeAlias = Any
Arr: TypeAlias = npt.NDArray[Any]

_TURN = threading.Lock()
"""Held during a call: eager operations of Horovod are known by their kind alone, so two of a kind must not overlap."""


def call_on_host(
    function: Callable[..., Sequence[Arr]], tensors: Sequence[Tensor], dtypes: Sequence[Any]
) -> list[Tensor]:
    """Call a function of arrays, which returns arrays; in a graph, add an operation that does so whenever it is run.

    The operations of a graph are run in the order in which they were added.

    Args:
        function: The function. It must not write to its arguments, which may be the memory of the tensors, nor, later
            on, to its results, which may become that of other tensors.
        tensors: Its arguments.
        dtypes: Dtypes of its results.
    """
    if tf.executing_eagerly():
        with _TURN, tf.device("cpu"):
            return [tf.convert_to_tensor(found) for found in function(*(tensor._numpy() for tensor in tensors))]

    def call(*arrays: Arr) -> Sequence[Arr]:
        with _TURN, tf.device("cpu"):
            return _told(function, arrays)

    # Without results, it returns the operation.
    return tf.numpy_function(call, tensors, dtypes) if dtypes else [tf.numpy_function(call, tensors, dtypes)]


def _told(function: Callable[..., Sequence[Arr]], arrays: Sequence[Arr]) -> Sequence[Arr]:
    """Call a function; raise errors so that TensorFlow and ``hvd.elastic.run`` make the best of them.

    TensorFlow makes a ValueError an InvalidArgumentError with its text. ``hvd.elastic.run`` goes on after a lost rank
    if the text names one of three operations, and swallows all else that it does not know.
    """
    try:
        return function(*arrays)
    except CompressionError as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    except tf.errors.OpError as error:
        raise RuntimeError(f"HorovodAllreduce, or another of its operations: {error.message}") from error
