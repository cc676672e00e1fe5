"""The primitives in TensorFlow, for use inside a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_compress.bucket import Shape
from hvd_compress.ops import KEY, MASK, MIX

Tensor: TypeAlias = Any


class TensorFlowOps:
    """See `hvd_compress.ops.Ops`. Steps and seeds may be int64 scalars of the graph."""

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

    def split(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        return list(tf.split(x, list(sizes)))

    def pad(self, x: Tensor, n: int) -> Tensor:
        return tf.pad(x, [[0, n - x.shape[0]]])

    def floor(self, x: Tensor) -> Tensor:
        return tf.floor(x)

    def clip(self, x: Tensor, low: float, high: float) -> Tensor:
        return tf.clip_by_value(x, low, high)

    def where(self, condition: Tensor, a: Any, b: Any) -> Tensor:
        return tf.where(condition, a, b)

    def absmax(self, x: Tensor) -> Tensor:
        return tf.reduce_max(tf.abs(x), axis=-1)

    def sum_squares(self, x: Tensor) -> Tensor:
        return tf.reduce_sum(tf.square(tf.cast(x, tf.float64)))

    def is_finite(self, x: Tensor) -> Tensor:
        return tf.math.is_finite(x)

    def transpose(self, x: Tensor) -> Tensor:
        return tf.transpose(x)

    def orthogonalise(self, x: Tensor) -> Tensor:
        peak = tf.reduce_max(tf.abs(x))  # TensorFlow's QR squares its input, so large ones would overflow
        return tf.linalg.qr(x / tf.where(peak > 0, peak, tf.ones_like(peak))).q

    def top_indices(self, x: Tensor, k: int) -> Tensor:
        return tf.cast(tf.sort(tf.math.top_k(tf.abs(x), k, sorted=False).indices), tf.int64)

    def take(self, x: Tensor, indices: Tensor) -> Tensor:
        return tf.gather(x, indices)

    def put(self, x: Tensor, indices: Tensor, values: Any) -> Tensor:
        values = tf.broadcast_to(tf.cast(values, x.dtype), tf.shape(indices))
        return tf.tensor_scatter_nd_update(x, indices[:, None], values)

    def add_at(self, x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
        return tf.tensor_scatter_nd_add(x, indices[:, None], values)

    def to_bytes(self, *parts: Tensor) -> Tensor:
        return tf.concat([tf.reshape(tf.bitcast(part, tf.uint8), [-1]) for part in parts], 0)

    def from_bytes(self, data: Tensor, *parts: tuple[str, int]) -> list[Tensor]:
        widths = [np.dtype(dtype).itemsize * count for dtype, count in parts]
        return [
            tf.bitcast(tf.reshape(piece, [count, -1]) if np.dtype(dtype).itemsize > 1 else piece, dtype)
            for piece, (dtype, count) in zip(self.split(data, widths), parts, strict=True)
        ]

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


def _mix32(x: Tensor, key: Tensor | None = None) -> Tensor:
    """The mixer of `hvd_compress.ops.mix32` on uint32 tensors; ``key`` is added half-way."""

    def fold(x: Tensor, shift: int) -> Tensor:
        return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(shift, tf.uint32)))

    x = fold(x, 16) * tf.constant(MIX[0], tf.uint32)
    x = fold(x, 15)
    if key is not None:
        x += key
    return fold(x * tf.constant(MIX[1], tf.uint32), 16)
