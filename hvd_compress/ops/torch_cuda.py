"""Primitives in PyTorch on a GPU, with kernels for hot ones in float32; other dtypes use the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_compress.ops.arrays import Array
from hvd_compress.ops.code import Code
from hvd_compress.ops.kernels import cuda
from hvd_compress.ops.kernels.cuda.top_code import fits
from hvd_compress.ops.moments import Sides
from hvd_compress.ops.torch import TorchOps, largest
from hvd_compress.ops.totals import EncodedSum, dense


class TorchCudaOps(TorchOps):
    """Primitives in PyTorch with GPU kernels. See `hvd_compress.ops.Ops`."""

    def _fits(self, *arrays: Tensor) -> bool:
        return all(x.dtype == torch.float32 and 0 < x.numel() < 2**31 for x in arrays)

    def fill(self, buffer: Tensor, span: slice, grad: Tensor, scale: float) -> float | Tensor:
        if scale != 1 or not (grad.is_contiguous() and self._fits(buffer)) or grad.dtype == torch.float64:
            return super().fill(buffer, span, grad, scale)
        return cuda.put_finite(buffer[span], grad.view(-1))

    def absorb(self, buffer: Tensor, residual: Tensor, span: slice, grad: Tensor, scale: float) -> float | Tensor:
        if scale != 1 or not (grad.is_contiguous() and self._fits(buffer)) or grad.dtype == torch.float64:
            return super().absorb(buffer, residual, span, grad, scale)
        return cuda.put_finite(buffer[span], grad.view(-1), residual[span])

    def deliver(self, total: EncodedSum, pieces: Sequence[tuple[slice, Tensor]], factor: float) -> float | Tensor:
        if not pieces:
            return 0.0
        whole = dense(self, total) * factor
        # In a few launches, as each takes longer than its copy.
        torch._foreach_copy_([to for _, to in pieces], [whole[span].view(to.shape) for span, to in pieces])
        return largest([whole, *(to for _, to in pieces if to.dtype is not whole.dtype)])

    def quantise(self, x: Tensor, code: Code, seed: Any = 0, return_error: bool = False) -> tuple[Array, Array | None]:
        if not (self._fits(x) and fits(code)):
            return super().quantise(x, code, seed, return_error)
        return cuda.quantise(x, code, seed, return_error, x if return_error else None)

    def dequantise(self, rows: Tensor, code: Code, n: int, dtype: str, join: bool = False) -> Array:
        if dtype != "float32" or not (n and fits(code)):
            return super().dequantise(rows, code, n, dtype, join)
        return cuda.dequantise(rows, code, n, join)

    def to_lanes(self, rows: Tensor, limits: Tensor, top: int, width: int, seed: Any) -> Array:
        if not self._fits(rows, limits):
            return super().to_lanes(rows, limits, top, width, seed)
        return cuda.to_lanes(rows, limits, top, width, seed)

    def from_lanes(self, packed: Tensor, limits: Tensor, top: int, width: int, rows: int, columns: int) -> Array:
        if not self._fits(limits):
            return super().from_lanes(packed, limits, top, width, rows, columns)
        return cuda.from_lanes(packed, limits, top, width, rows, columns)

    def rotate(self, x: Tensor, seed: Any, block: int) -> Array:
        if not self._fits(x):
            return super().rotate(x, seed, block)
        return cuda.rotate(x, seed, block)

    def unrotate(self, rows: Tensor, seed: Any) -> Array:
        return cuda.unrotate(rows, seed) if self._fits(rows) else super().unrotate(rows, seed)

    def norms(self, rows: Tensor) -> Array:
        return cuda.norms(rows) if self._fits(rows) else super().norms(rows)

    def above(self, x: Tensor, threshold: Any) -> Array:
        return cuda.above(x, threshold) if self._fits(x) else super().above(x, threshold)

    def top_indices(self, x: Tensor, k: int) -> Array:
        return cuda.top_indices(x, k) if x.ndim == 1 and self._fits(x) else super().top_indices(x, k)

    def kth_magnitude(self, x: Tensor, k: int) -> Array:
        return cuda.kth_magnitude(x, k) if self._fits(x) else super().kth_magnitude(x, k)

    def scatter_sum(self, n: int, dtype: str, pieces: Sequence[tuple[Tensor, Tensor]]) -> Array:
        total = self.zeros((n,), dtype)
        for indices, values in pieces:
            values = self.cast(values, dtype)
            total = cuda.add_at(total, indices, values) if self._fits(total) else self.add_at(total, indices, values)
        return total

    def accelerate(
        self, x: Tensor, velocity: Tensor, residual: Tensor, momentum: float, nesterov: bool
    ) -> tuple[Array, Array]:
        if not self._fits(x):
            return super().accelerate(x, velocity, residual, momentum, nesterov)
        return cuda.accelerate(x, velocity, residual, momentum, nesterov)

    def precondition(self, x: Tensor, second: Tensor, sides: Sequence[Sides], beta2: float) -> tuple[Array, Array]:
        if not self._fits(x, second):
            return super().precondition(x, second, sides, beta2)
        return cuda.precondition(x, second, sides, beta2)
