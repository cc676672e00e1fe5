"""Reference primitives in numpy, which other implementations must agree with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import ExchangeError
from hvd_compress.ops import wrong_length
from hvd_compress.ops.arrays import Shape
from hvd_compress.ops.hashing import hash_indices
from hvd_compress.ops.reference import ReferenceOps

Arr = npt.NDArray[Any]


class NumpyOps(ReferenceOps):
    """Primitives in numpy. See `hvd_compress.ops.Ops`."""

    name = "numpy"

    def dtype(self, x: Arr) -> str:
        return x.dtype.name

    def cast(self, x: Arr, dtype: str) -> Arr:
        with np.errstate(over="ignore"):  # float16 of a large number is inf, as in the other frameworks
            return x.astype(dtype, copy=False)

    def constant(self, values: Arr) -> Arr:
        return values.copy()

    def zeros(self, shape: Shape, dtype: str) -> Arr:
        return np.zeros(shape, dtype)

    def arange(self, n: int) -> Arr:
        return np.arange(n, dtype=np.int64)

    def reshape(self, x: Arr, shape: Shape) -> Arr:
        return x.reshape(shape)

    def concat(self, parts: Sequence[Arr]) -> Arr:
        return np.concatenate(parts)

    def stack(self, parts: Sequence[Arr]) -> Arr:
        return np.stack(parts, axis=1)

    def split(self, x: Arr, sizes: Sequence[int]) -> list[Arr]:
        return np.split(x, np.cumsum(sizes)[:-1])

    def pad(self, x: Arr, n: int) -> Arr:
        return x if n == x.size else np.pad(x, (0, n - x.size))

    def abs(self, x: Arr) -> Arr:
        return np.abs(x)

    def sqrt(self, x: Arr) -> Arr:
        root: Arr = np.sqrt(x)
        return root

    def log(self, x: Arr) -> Arr:
        logarithm: Arr = np.log(x)
        return logarithm

    def lgamma(self, x: Arr) -> Arr:
        return np.asarray(np.vectorize(math.lgamma, otypes=[x.dtype])(x))

    def floor(self, x: Arr) -> Arr:
        return np.floor(x)

    def clip(self, x: Arr, low: float, high: float) -> Arr:
        return np.clip(x, low, high)

    def where(self, condition: Arr, a: Any, b: Any) -> Arr:
        return np.where(condition, a, b)

    def sum(self, x: Arr) -> Arr:
        return np.asarray(np.sum(x, axis=-1))

    def absmax(self, x: Arr) -> Arr:
        peak: Arr = np.max(np.abs(x), axis=-1)
        return peak

    def extremes(self, x: Arr) -> Arr:
        return np.array([x.min(), x.max()])

    def sum_squares(self, x: Arr) -> Arr:
        return np.asarray(np.sum(np.square(x, dtype=np.float64)))

    def is_finite(self, x: Arr) -> Arr:
        finite: Arr = np.isfinite(x)
        return finite

    def transpose(self, x: Arr) -> Arr:
        return x.T

    def orthogonalise(self, x: Arr) -> Arr:
        q: Arr = np.linalg.qr(x)[0]
        return q

    def top_indices(self, x: Arr, k: int) -> Arr:
        return np.sort(np.argsort(-np.abs(x), kind="stable")[..., :k])

    def kth_magnitude(self, x: Arr, k: int) -> Arr:
        return np.asarray(-np.partition(-np.abs(x), k - 1)[k - 1])

    def nonzero(self, condition: Arr) -> Arr:
        return np.flatnonzero(condition)

    def histogram(self, x: Arr, n: int) -> Arr:
        return np.bincount(x, minlength=n).astype(np.int32)

    def repeat(self, x: Arr, counts: Arr) -> Arr:
        return np.repeat(x, counts)

    def take(self, x: Arr, indices: Arr) -> Arr:
        return x[indices]

    def put(self, x: Arr, indices: Arr, values: Any) -> Arr:
        x[indices] = values
        return x

    def only(self, x: Arr, start: int, values: Arr) -> Arr:
        stop = start + len(values)
        x[:start], x[start:stop], x[stop:] = 0, values, 0
        return x

    def add_at(self, x: Arr, indices: Arr, values: Arr) -> Arr:
        x[indices] += values
        return x

    def bitcast(self, x: Arr, dtype: str) -> Arr:
        return x.view(dtype)

    def to_bfloat16(self, x: Arr) -> Arr:
        bits = x.view(np.uint32)
        odd = bits >> np.uint32(16) & np.uint32(1)
        return (bits + np.uint32(0x7FFF) + odd >> np.uint32(16)).astype(np.uint16)  # half-way to even

    def from_bfloat16(self, x: Arr) -> Arr:
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)

    def to_bytes(self, *parts: Arr) -> Arr:
        return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts])

    def from_bytes(self, data: Arr, *parts: tuple[str, Any]) -> list[Arr]:
        widths = [np.dtype(dtype).itemsize * count for dtype, count in parts]
        pieces = self.split(self.check(data, data.size == sum(widths), wrong_length(data.size, sum(widths))), widths)
        return [piece.copy().view(dtype) for piece, (dtype, _) in zip(pieces, parts, strict=True)]

    def check(self, x: Arr, ok: Any, message: str) -> Arr:
        if not np.all(ok):
            raise ExchangeError(message)
        return x

    def uniform(self, seed: int, n: int) -> Arr:
        return (hash_indices(seed, np.arange(n)) >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)

    def below(self, seed: int, bounds: Arr) -> Arr:
        return (hash_indices(seed, np.arange(bounds.size)).astype(np.int64) * bounds) >> 32

    def on_host(self, function: Callable[..., Any], dtype: str, shape: Shape, *arrays: Arr) -> Arr:
        return np.asarray(function(*arrays), dtype).reshape(shape)
