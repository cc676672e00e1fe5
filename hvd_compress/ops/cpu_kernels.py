"""CPU kernels of hot primitives for float32 arrays that numpy can read; other dtypes use the reference."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_compress.ops.arrays import Array
from hvd_compress.ops.buffer_pool import BufferPool
from hvd_compress.ops.code import Code
from hvd_compress.ops.kernels import cpu
from hvd_compress.ops.moments import Sides
from hvd_compress.ops.reference import ReferenceOps
from hvd_compress.ops.sketch import Sketch

Arr: TypeAlias = npt.NDArray[Any]

SPARE = BufferPool()
"""Memory for large results, of all who have no pool of their own."""


class HostOps(ReferenceOps):
    """Primitives that always run on the host, by CPU kernels. See `hvd_compress.ops.Ops`."""

    def rehearse_sketch(self, sketch: Sketch, union: Array, keys: Array) -> Array:
        return self.on_host(partial(cpu.rehearse_sketch, sketch), "int64", (1,), union, keys)

    def write_sketch(self, sketch: Sketch, union: Array, key: Array, peak: Array, x: Array) -> Array:
        return self.on_host(partial(cpu.write_sketch, sketch), "int64", (sketch.cells,), union, key, peak, x)

    def read_sketch(self, sketch: Sketch, union: Array, key: Array, peak: Array, sums: Array) -> Array:
        shape = (int(union.shape[0]),)
        return self.on_host(partial(cpu.read_sketch, sketch), sketch.dtype, shape, union, key, peak, sums)


class CpuKernelOps(HostOps):
    """Primitives by CPU kernels. See `hvd_compress.ops.Ops`; subclasses give numpy access to a framework's arrays."""

    @abstractmethod
    def call(self, function: Callable[..., Sequence[Arr]], *arrays: Any) -> list[Array]:
        """Call a function of numpy arrays and numbers, and return its results as the framework's arrays."""

    def _fits(self, *arrays: Array) -> bool:
        return all(self.dtype(x) == "float32" for x in arrays)

    def room(self, n: int) -> Arr:
        """Return memory for ``n`` float32 that the framework uses without a copy."""
        return SPARE.take(n)

    def quantise(self, x: Array, code: Code, seed: Any = 0, return_error: bool = False) -> tuple[Array, Array | None]:
        if not self._fits(x):
            return super().quantise(x, code, seed, return_error)
        data, error = self.quantise_parts(x, 1, code, seed, return_error, draw=False)
        return self.reshape(data, (-1,)), error

    def quantise_parts(
        self, x: Array, parts: int, code: Code, seed: Any = 0, return_error: bool = False, draw: bool = True
    ) -> tuple[Array, Array | None]:
        if not self._fits(x):
            return super().quantise_parts(x, parts, code, seed, return_error)
        n = int(x.shape[0])
        size = -(-n // parts)
        row = code.size(size, "float32")

        def run(x: Arr, *seeds: Arr) -> list[Arr]:
            data, error = np.empty((parts, row), np.uint8), x if return_error else None
            for i in range(parts):
                here = slice(i * size, (i + 1) * size)
                data[i] = _quantise(x[here], code, int(seeds[i]), None if error is None else error[here], size)
            return [data] if error is None else [data, error]

        seeds = [self.seed(seed, i) for i in range(parts)] if draw else [seed]
        found = self.call(run, x, *seeds)
        return found[0], found[1] if return_error else None

    def dequantise(self, rows: Array, code: Code, n: int, dtype: str, join: bool = False) -> Array:
        if dtype != "float32":
            return super().dequantise(rows, code, n, dtype, join)
        count = int(rows.shape[0])
        size = n * (count if join else 1)
        return self.call(lambda rows: [cpu.dequantise(rows, code, n, join, self.room(size))], rows)[0]

    def blend(self, x: Array, y: Array, share: float) -> Array:
        if not self._fits(x, y):
            return super().blend(x, y, share)
        return self.call(lambda x, y: [cpu.blend(x, y, share, y)], x, y)[0]

    def majority(self, count: Array, seed: Any, size: float) -> Array:
        if not self._fits(count):
            return super().majority(count, seed, size)
        return self.call(
            lambda count, seed: [cpu.majority(count, int(seed), size, count)],
            *(count, seed),
        )[0]

    def pack(self, codes: Array, bits: int) -> Array:
        return self.call(lambda codes: [cpu.pack(codes, bits)], codes)[0]

    def unpack(self, data: Array, bits: int, n: int) -> Array:
        return self.call(lambda data: [cpu.unpack(data, bits, n)], data)[0]

    def saturating_sum(self, rows: Array, bits: int, zero: int, size: int) -> Array:
        return self.call(lambda rows: [cpu.saturating_sum(rows, bits, zero, size)], rows)[0]

    def to_steps(self, x: Array, ends: Array, top: int) -> Array:
        if not self._fits(x, ends):
            return super().to_steps(x, ends, top)
        return self.call(lambda x, ends: [cpu.to_steps(x, ends, top)], x, ends)[0]

    def from_steps(self, codes: Array, ends: Array, top: int) -> Array:
        if not self._fits(ends):
            return super().from_steps(codes, ends, top)
        return self.call(lambda codes, ends: [cpu.from_steps(codes, ends, top)], codes, ends)[0]

    def to_lanes(self, rows: Array, limits: Array, top: int, width: int, seed: Any) -> Array:
        if not self._fits(rows, limits):
            return super().to_lanes(rows, limits, top, width, seed)
        return self.call(
            lambda rows, limits, seed: [cpu.to_lanes(rows, limits, top, width, int(seed))],
            *(rows, limits, seed),
        )[0]

    def from_lanes(self, packed: Array, limits: Array, top: int, width: int, rows: int, columns: int) -> Array:
        if not self._fits(limits):
            return super().from_lanes(packed, limits, top, width, rows, columns)
        return self.call(
            lambda packed, limits: [
                cpu.from_lanes(packed, limits, top, width, rows, columns, self.room(rows * columns))
            ],
            *(packed, limits),
        )[0]

    def rotate(self, x: Array, seed: Any, block: int) -> Array:
        if not self._fits(x):
            return super().rotate(x, seed, block)
        return self.call(lambda x, seed: [cpu.rotate(x, int(seed), block)], x, seed)[0]

    def unrotate(self, rows: Array, seed: Any) -> Array:
        if not self._fits(rows):
            return super().unrotate(rows, seed)
        return self.call(lambda rows, seed: [cpu.unrotate(rows, int(seed), rows)], rows, seed)[0]

    def absmax(self, x: Array) -> Array:
        if not self._fits(x):
            return super().absmax(x)  # type: ignore[safe-super]  # the framework's own
        return self.call(lambda x: [cpu.absmax(x)], x)[0]

    def orthogonalise(self, x: Array) -> Array:
        if not self._fits(x):
            return super().orthogonalise(x)  # type: ignore[safe-super]  # the framework's own
        return self.call(lambda x: [cpu.orthogonalise(x)], x)[0]

    def norms(self, rows: Array) -> Array:
        if not self._fits(rows):
            return super().norms(rows)
        return self.call(lambda rows: [cpu.norms(rows)], rows)[0]

    def above(self, x: Array, threshold: Any) -> Array:
        if not self._fits(x):
            return super().above(x, threshold)
        return self.call(lambda x, least: [cpu.above(x, float(least))], x, threshold)[0]

    def top_indices(self, x: Array, k: int) -> Array:
        if len(x.shape) > 1 or not self._fits(x):
            return super().top_indices(x, k)  # type: ignore[safe-super]  # the framework's own
        return self.call(lambda x: [cpu.top_indices(x, k)], x)[0]

    def kth_magnitude(self, x: Array, k: int) -> Array:
        if not self._fits(x):
            return super().kth_magnitude(x, k)  # type: ignore[safe-super]
        return self.call(lambda x: [np.asarray(cpu.kth_magnitude(x, k), np.float32)], x)[0]

    def scatter_sum(self, n: int, dtype: str, pieces: Sequence[tuple[Array, Array]]) -> Array:
        if dtype != "float32":
            return super().scatter_sum(n, dtype, pieces)

        def run(*arrays: Arr) -> list[Arr]:
            total = self.room(n)  # np.zeros would allocate small pages
            total.fill(0)
            for indices, values in zip(arrays[::2], arrays[1::2], strict=True):
                cpu.add_at(total, indices, values.astype(np.float32, copy=False))
            return [total]

        return self.call(run, *(array for piece in pieces for array in piece))[0]

    def ascending(self, indices: Array, n: int) -> Any:
        return self.call(lambda indices: [np.asarray(cpu.ascending(indices, n))], indices)[0]

    def accelerate(
        self, x: Array, velocity: Array, residual: Array, momentum: float, nesterov: bool
    ) -> tuple[Array, Array]:
        if not self._fits(x):
            return super().accelerate(x, velocity, residual, momentum, nesterov)
        fast, piled = self.call(
            lambda x, v, r: cpu.accelerate(x, v, r, momentum, nesterov, x),
            *(x, velocity, residual),
        )
        return fast, piled

    def precondition(self, x: Array, second: Array, sides: Sequence[Sides], beta2: float) -> tuple[Array, Array]:
        if not self._fits(x, second):
            return super().precondition(x, second, sides, beta2)
        update, moments = self.call(
            lambda x, second: cpu.precondition(x, second, sides, beta2, x),
            *(x, second),
        )
        return update, moments

    def tail(self, x: Array, unit: Any, threshold: Any, logs: bool = False) -> Array:
        if not self._fits(x):
            return super().tail(x, unit, threshold, logs)
        return self.call(
            lambda x, unit, least: [cpu.tail(x, float(unit), float(least), logs)],
            *(x, unit, threshold),
        )[0]


def _quantise(x: Arr, code: Code, seed: int, error: Arr | None, size: int) -> Arr:
    """Return the bytes of a part, padded with zeros to ``size``, and write the error to ``error``."""
    if x.size == size:
        return cpu.quantise(x, code, seed, error)
    rest = None if error is None else np.empty(size, x.dtype)
    data = cpu.quantise(np.pad(x, (0, size - x.size)), code, seed, rest)
    if error is not None and rest is not None:
        error[...] = rest[: x.size]
    return data
