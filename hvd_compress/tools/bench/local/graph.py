"""The hot primitives in TensorFlow: as kernels that the graph calls, compiled by XLA, as plain operations."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.errors import MissingPackageError
from hvd_compress.ops.code import Code
from hvd_compress.tools.bench.local.timing import plain_copy, timed

_CODE, _SHARE = Code("max", 4, 512), 100


class Line(NamedTuple):
    """A result, in plain copies of the array."""

    name: str
    kernel: float  # A compiled loop behind ``tf.numpy_function``, as the package uses it on CPUs
    xla: float  # The composition of TensorFlow's operations, with ``jit_compile=True``
    plain: float  # The same without


NAMES = ("4 bits: quantise, pack, keep what is left", "4 bits: unpack and add up 2", "exact top 1%")


def measure(n: int, turns: int, progress: Callable[[str], None] = lambda name: None) -> list[Line]:
    """Time the primitives on ``n`` float32.

    Raises:
        MissingPackageError: If TensorFlow is not installed.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow as tf

        from hvd_compress.ops.tensorflow import TensorFlowCpuOps, TensorFlowOps
    except ImportError as error:
        raise MissingPackageError(
            f"this needs TensorFlow ({error}); install it with: pip install tensorflow"
        ) from error
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    copy = plain_copy(n)
    plain, compiled = TensorFlowOps(), TensorFlowCpuOps()
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for number, name in enumerate(NAMES):
        progress(name)
        for ops, jit in ((compiled, False), (plain, True), (plain, False)):
            function, given = _primitives(tf, ops, n)[number]
            run = partial(tf.function(function, jit_compile=jit), *given)
            found[name].append(timed(run, copy, turns).ratio)
    return [Line(name, *ratios) for name, ratios in found.items()]


def _primitives(tf: Any, ops: Any, n: int) -> list[tuple[Callable[..., Any], list[Any]]]:
    """Return the primitives in the order of their names, with their arguments."""
    x = tf.constant(np.random.default_rng(0).standard_normal(n, np.float32))
    data, _ = ops.quantise(x, _CODE, 1)
    return [
        (lambda x: ops.quantise(x, _CODE, 1, keep=True), [x]),
        (lambda rows: ops.dequantise(rows, _CODE, n, "float32"), [tf.stack([data, data])]),
        (lambda x: ops.top_indices(x, max(1, n // _SHARE)), [x]),
    ]
