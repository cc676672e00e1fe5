"""Primitives in TensorFlow, for use within a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_compress.errors import ExchangeError
from hvd_compress.ops import KEY, MASK, MIX, wrong_length
from hvd_compress.ops.arrays import Shape
from hvd_compress.ops.cpu_kernels import CpuKernelOps, HostOps, Out
from hvd_compress.ops.kernels import cpu

Tensor: TypeAlias = Any

_ALIGNMENT = 64
"""Alignment in bytes; TensorFlow copies numpy arrays that are not aligned to it."""


class TensorFlowOps(HostOps):
    """Primitives in TensorFlow. See `hvd_compress.ops.Ops`; steps and seeds may be int64 scalars of the graph."""

    name = "tensorflow"

    def dtype(self, x: Tensor) -> str:
        return str(x.dtype.name)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        return tf.cast(x, dtype)

    def constant(self, values: npt.NDArray[Any]) -> Tensor:
        return tf.constant(values)

    def zeros(self, shape: Shape, dtype: str) -> Tensor:
        return tf.zeros(shape, dtype)

    def arange(self, n: int) -> Tensor:
        return tf.range(n, dtype=tf.int64)

    def reshape(self, x: Tensor, shape: Shape) -> Tensor:
        return tf.reshape(x, shape)

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        return tf.concat(parts, 0)

    def stack(self, parts: Sequence[Tensor]) -> Tensor:
        return tf.stack(parts, axis=1)

    def split(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        return list(tf.split(x, list(sizes)))

    def pad(self, x: Tensor, n: int) -> Tensor:
        return x if n == x.shape[0] else tf.pad(x, [[0, n - x.shape[0]]])

    def abs(self, x: Tensor) -> Tensor:
        return tf.abs(x)

    def sqrt(self, x: Tensor) -> Tensor:
        return tf.sqrt(x)

    def log(self, x: Tensor) -> Tensor:
        return tf.math.log(x)

    def lgamma(self, x: Tensor) -> Tensor:
        return tf.math.lgamma(x)

    def floor(self, x: Tensor) -> Tensor:
        return tf.floor(x)

    def clip(self, x: Tensor, low: float, high: float) -> Tensor:
        return tf.clip_by_value(x, low, high)

    def where(self, condition: Tensor, a: Any, b: Any) -> Tensor:
        return tf.where(condition, a, b)

    def sum(self, x: Tensor) -> Tensor:
        return tf.reduce_sum(x, axis=-1)

    def absmax(self, x: Tensor) -> Tensor:
        return tf.reduce_max(tf.abs(x), axis=-1)

    def extremes(self, x: Tensor) -> Tensor:
        return tf.stack([tf.reduce_min(x), tf.reduce_max(x)])

    def sum_squares(self, x: Tensor) -> Tensor:
        return tf.reduce_sum(tf.square(tf.cast(x, tf.float64)))

    def is_finite(self, x: Tensor) -> Tensor:
        return tf.math.is_finite(x)

    def transpose(self, x: Tensor) -> Tensor:
        return tf.transpose(x)

    def orthogonalise(self, x: Tensor) -> Tensor:
        peak = tf.reduce_max(tf.abs(x))  # TensorFlow's QR squares its input, which may overflow
        return tf.linalg.qr(x / tf.where(peak > 0, peak, tf.ones_like(peak))).q

    def top_indices(self, x: Tensor, k: int) -> Tensor:
        return tf.cast(tf.sort(tf.math.top_k(tf.abs(x), k, sorted=False).indices), tf.int64)

    def kth_magnitude(self, x: Tensor, k: int) -> Tensor:
        return tf.math.top_k(tf.abs(x), k).values[-1]

    def nonzero(self, condition: Tensor) -> Tensor:
        return tf.where(condition)[:, 0]

    def size(self, x: Tensor) -> Tensor:
        return tf.size(x, tf.int64)

    def length(self, x: Tensor) -> Tensor:
        return tf.cast(x[0], tf.int64)

    def histogram(self, x: Tensor, n: int) -> Tensor:
        return tf.math.unsorted_segment_sum(tf.ones_like(x, tf.int32), x, n)

    def repeat(self, x: Tensor, counts: Tensor) -> Tensor:
        return tf.repeat(x, counts)

    def take(self, x: Tensor, indices: Tensor) -> Tensor:
        return tf.gather(x, indices)

    def put(self, x: Tensor, indices: Tensor, values: Any) -> Tensor:
        values = tf.broadcast_to(tf.cast(values, x.dtype), tf.concat([tf.shape(indices), tf.shape(x)[1:]], 0))
        return tf.tensor_scatter_nd_update(x, indices[:, None], values)

    def only(self, x: Tensor, start: int, values: Tensor) -> Tensor:
        return tf.pad(values, [[start, x.shape[0] - start - values.shape[0]]])

    def add_at(self, x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
        return tf.tensor_scatter_nd_add(x, indices[:, None], values)

    def bitcast(self, x: Tensor, dtype: str) -> Tensor:
        return tf.bitcast(x, dtype)

    def to_bfloat16(self, x: Tensor) -> Tensor:
        return tf.bitcast(tf.cast(x, tf.bfloat16), tf.uint16)

    def from_bfloat16(self, x: Tensor) -> Tensor:
        return tf.cast(tf.bitcast(x, tf.bfloat16), tf.float32)

    def to_bytes(self, *parts: Tensor) -> Tensor:
        return tf.concat([tf.reshape(tf.bitcast(part, tf.uint8), [-1]) for part in parts], 0)

    def from_bytes(self, data: Tensor, *parts: tuple[str, Any]) -> list[Tensor]:
        widths = [np.dtype(dtype).itemsize for dtype, _ in parts]
        sizes = [width * count for width, (_, count) in zip(widths, parts, strict=True)]
        if data.shape[0] is None or any(tf.is_tensor(size) for size in sizes):
            data = self.check(data, tf.size(data, tf.int64) == sum(sizes), wrong_length())
        else:
            data = self.check(data, data.shape[0] == sum(sizes), wrong_length(data.shape[0], sum(sizes)))
        pieces = tf.split(data, sizes)
        read = []
        for piece, width, (dtype, count) in zip(pieces, widths, parts, strict=True):
            # A reshape to a number of rows would make Grappler assume that number and drop the check.
            part = tf.bitcast(tf.reshape(piece, [-1, width]) if width > 1 else piece, dtype)
            read.append(tf.ensure_shape(part, [None if tf.is_tensor(count) else count]))
        return read

    def check(self, x: Tensor, ok: Any, message: str) -> Tensor:
        if isinstance(ok, bool) or tf.executing_eagerly():
            if not np.all(ok):
                raise ExchangeError(message)
            return x
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(ok), [message])]):
            return tf.identity(x)

    def seed(self, *parts: Any) -> Tensor:
        seed = tf.constant(0, tf.uint32)
        for part in parts:
            part = tf.constant(part & MASK, tf.uint32) if isinstance(part, int) else tf.cast(part, tf.uint32)
            seed = _mix32(seed + tf.constant(KEY, tf.uint32) + part)
        return seed

    def _hash(self, seed: Tensor, n: int) -> Tensor:
        x = tf.bitwise.bitwise_xor(tf.cast(tf.range(n), tf.uint32), seed)
        return _mix32(x, _mix32(seed + tf.constant(KEY, tf.uint32)))

    def uniform(self, seed: Tensor, n: int) -> Tensor:
        return tf.cast(tf.bitwise.right_shift(self._hash(seed, n), tf.constant(8, tf.uint32)), tf.float32) * 2**-24

    def below(self, seed: Tensor, bounds: Tensor) -> Tensor:
        return tf.cast(self._hash(seed, bounds.shape[0]), tf.int64) * bounds // 2**32

    def stage(self, step: Any, boundaries: Sequence[int]) -> Tensor:
        return tf.add_n([tf.cast(step >= boundary, tf.int32) for boundary in boundaries])

    def merge(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Concatenate gradients, with zeros for those that are not finite, and count these."""
        finite = [tf.reduce_all(tf.math.is_finite(part)) for part in parts]
        kept = [tf.where(ok, part, tf.zeros_like(part)) for ok, part in zip(finite, parts, strict=True)]
        bad = tf.add_n([tf.cast(~ok, tf.int32) for ok in finite])
        return tf.concat([tf.reshape(part, [-1]) for part in kept], 0), bad

    def choose(self, condition: Any, yes: Callable[[], Tensor], no: Callable[[], Tensor]) -> Tensor:
        return tf.cond(tf.convert_to_tensor(condition), yes, no)

    def on_host(self, function: Callable[..., Any], dtype: str, shape: Shape, *arrays: Tensor) -> Tensor:
        result = tf.numpy_function(lambda *a: np.asarray(function(*a), dtype).reshape(shape), arrays, dtype)
        return tf.ensure_shape(result, shape)


class TensorFlowCpuOps(CpuKernelOps, TensorFlowOps):
    """Primitives with CPU kernels, which a graph calls through `tf.numpy_function`."""

    in_place = False

    def room(self, n: int) -> npt.NDArray[np.float32]:
        memory = np.empty(n + _ALIGNMENT // 4, np.float32)
        start = -memory.ctypes.data % _ALIGNMENT // 4
        return memory[start : start + n]

    def merge(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        if not self._fits(*parts):
            return super().merge(parts)

        def run(*arrays: Any) -> list[Any]:
            x, start, bad = self.room(n), 0, 0
            for array in arrays:
                bad += not cpu.put_finite(x[start : start + array.size], array.reshape(-1))
                start += array.size
            return [x, np.int32(bad)]

        n = sum(part.shape.num_elements() for part in parts)
        x, bad = self.call(run, [("float32", (n,)), ("int32", ())], *parts)
        return x, bad

    def call(self, function: Callable[..., Sequence[Any]], outs: Sequence[Out], *arrays: Any) -> list[Tensor]:
        def run(*given: Any) -> list[Any]:
            return [np.asarray(found) for found in function(*given)]

        if tf.executing_eagerly():
            return [tf.convert_to_tensor(found) for found in run(*(_numpy(array) for array in arrays))]
        # TensorFlow would convert a Python float to float32.
        given = [tf.constant(a, tf.float64) if isinstance(a, float) else tf.convert_to_tensor(a) for a in arrays]
        found = tf.numpy_function(run, given, [dtype for dtype, _ in outs])
        return [tf.ensure_shape(part, shape) for part, (_, shape) in zip(found, outs, strict=True)]


def tensorflow_ops() -> TensorFlowOps:
    """Return the primitives for this machine: CPU kernels, unless there is an accelerator."""
    return TensorFlowOps() if tf.config.list_physical_devices("GPU") else TensorFlowCpuOps()


def _numpy(x: Any) -> Any:
    return x.numpy() if tf.is_tensor(x) else x


def _mix32(x: Tensor, key: Tensor | None = None) -> Tensor:
    """Apply `hvd_compress.ops.mix32` to uint32 tensors, with ``key`` added half-way."""

    def fold(x: Tensor, shift: int) -> Tensor:
        return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(shift, tf.uint32)))

    x = fold(x, 16) * tf.constant(MIX[0], tf.uint32)
    x = fold(x, 15)
    if key is not None:
        x += key
    return fold(x * tf.constant(MIX[1], tf.uint32), 16)
