"""Primitives in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_compress.errors import ExchangeError
from hvd_compress.ops import MIX, second_key, wrong_length
from hvd_compress.ops.arrays import Shape
from hvd_compress.ops.cpu_kernels import CpuKernelOps, HostOps
from hvd_compress.ops.delivery import Places, deliver_parts
from hvd_compress.ops.kernels import cpu
from hvd_compress.ops.totals import EncodedSum, LowRankSum, QuantizedSum, SparseSum, dense


class TorchOps(HostOps):
    """Primitives in PyTorch. See `hvd_compress.ops.Ops`.

    Args:
        device: Device of new tensors.
    """

    name = "torch"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def dtype(self, x: Tensor) -> str:
        return str(x.dtype).removeprefix("torch.")

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        return x.to(getattr(torch, dtype))

    def constant(self, values: npt.NDArray[Any]) -> Tensor:
        return torch.tensor(values, device=self.device)

    def zeros(self, shape: Shape, dtype: str) -> Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    def arange(self, n: int) -> Tensor:
        return torch.arange(n, device=self.device)

    def empty(self, n: int, dtype: str) -> Tensor:
        """Return uninitialised memory for ``n`` numbers."""
        return torch.empty(n, dtype=getattr(torch, dtype), device=self.device)

    def fill(self, buffer: Tensor, span: slice, grad: Tensor, scale: float) -> float | Tensor:
        """Copy a gradient, divided by a scale, to its place in a buffer, or zeros if it is not finite.

        Returns:
            A number that is inf or nan if the gradient is not finite.
        """
        place = buffer[span]
        place.view(grad.shape).copy_(grad)
        if scale != 1:
            place.div_(scale)
        peak: Tensor = torch.linalg.vector_norm(place, ord=torch.inf)
        place.copy_(torch.where(peak.isfinite(), place, 0.0))  # without a device synchronisation
        return peak

    def absorb(self, buffer: Tensor, residual: Tensor, span: slice, grad: Tensor, scale: float) -> float | Tensor:
        """Write residual plus gradient, divided by a scale, to a buffer, or the residual alone if it is not finite.

        Returns:
            A number that is inf or nan if the gradient is not finite.
        """
        peak = self.fill(buffer, span, grad, scale)
        buffer[span].add_(residual[span])
        return peak

    def deliver(self, total: EncodedSum, pieces: Sequence[tuple[slice, Tensor]], factor: float) -> float | Tensor:
        """Write the pieces of a sum, times a factor, to separate tensors.

        Returns:
            A number that is inf or nan if what was written is not finite: a float on the CPU, else a scalar tensor.
        """
        whole = dense(self, total)
        for span, to in pieces:
            torch.mul(whole[span].view(to.shape), factor, out=to)
        return largest([to for _, to in pieces])

    def reshape(self, x: Tensor, shape: Shape) -> Tensor:
        return x.reshape(shape)

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    def stack(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(parts), dim=1)

    def split(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        return list(torch.split(x, list(sizes)))

    def pad(self, x: Tensor, n: int) -> Tensor:
        return x if n == x.numel() else torch.nn.functional.pad(x, (0, n - x.numel()))

    def abs(self, x: Tensor) -> Tensor:
        return x.abs()

    def sqrt(self, x: Tensor) -> Tensor:
        return x.sqrt()

    def log(self, x: Tensor) -> Tensor:
        return x.log()

    def lgamma(self, x: Tensor) -> Tensor:
        return x.lgamma()

    def floor(self, x: Tensor) -> Tensor:
        return torch.floor(x)

    def clip(self, x: Tensor, low: float, high: float) -> Tensor:
        return torch.clamp(x, low, high)

    def where(self, condition: Tensor, a: Any, b: Any) -> Tensor:
        return torch.where(condition, a, b)

    def sum(self, x: Tensor) -> Tensor:
        return x.sum(-1)

    def absmax(self, x: Tensor) -> Tensor:
        least, most = torch.aminmax(x, dim=-1)
        return torch.maximum(-least, most)

    def extremes(self, x: Tensor) -> Tensor:
        return torch.stack(torch.aminmax(x))

    def sum_squares(self, x: Tensor) -> Tensor:
        return x.to(torch.float64).square().sum()

    def is_finite(self, x: Tensor) -> Tensor:
        return torch.isfinite(x)

    def transpose(self, x: Tensor) -> Tensor:
        return x.T

    def orthogonalise(self, x: Tensor) -> Tensor:
        q: Tensor = torch.linalg.qr(x).Q
        return q

    def top_indices(self, x: Tensor, k: int) -> Tensor:
        size = x.abs()
        if x.ndim > 1:
            return torch.sort(size.sort(dim=-1, descending=True, stable=True).indices[..., :k], dim=-1).values
        if k == x.numel():
            return self.arange(k)
        least = torch.topk(size, k, sorted=False).values.min()
        above = torch.nonzero(size > least).flatten()
        ties = torch.nonzero(size == least).flatten()  # torch.topk leaves open which of these it takes
        return torch.sort(torch.cat([above, ties[: k - above.numel()]])).values

    def kth_magnitude(self, x: Tensor, k: int) -> Tensor:
        return torch.topk(x.abs(), k).values[-1]

    def nonzero(self, condition: Tensor) -> Tensor:
        return torch.nonzero(condition).flatten()

    def histogram(self, x: Tensor, n: int) -> Tensor:
        return torch.bincount(x, minlength=n).to(torch.int32)

    def repeat(self, x: Tensor, counts: Tensor) -> Tensor:
        return torch.repeat_interleave(x, counts)

    def take(self, x: Tensor, indices: Tensor) -> Tensor:
        return x.index_select(0, indices)

    def put(self, x: Tensor, indices: Tensor, values: Any) -> Tensor:
        if isinstance(values, Tensor):
            return x.index_copy_(0, indices, values.to(x.dtype))
        return x.index_fill_(0, indices, values)

    def only(self, x: Tensor, start: int, values: Tensor) -> Tensor:
        stop = start + values.shape[0]
        x[:start].zero_()
        x[start:stop].copy_(values)
        x[stop:].zero_()
        return x

    def add_at(self, x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
        return x.index_add_(0, indices, values)

    def bitcast(self, x: Tensor, dtype: str) -> Tensor:
        return x.view(getattr(torch, dtype))

    def to_bfloat16(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).view(torch.uint16)

    def from_bfloat16(self, x: Tensor) -> Tensor:
        return x.view(torch.bfloat16).to(torch.float32)

    def to_bytes(self, *parts: Tensor) -> Tensor:
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts])

    def from_bytes(self, data: Tensor, *parts: tuple[str, Any]) -> list[Tensor]:
        dtypes = [getattr(torch, dtype) for dtype, _ in parts]
        widths = [dtype.itemsize * count for dtype, (_, count) in zip(dtypes, parts, strict=True)]
        size = data.numel()
        pieces = self.split(self.check(data, size == sum(widths), wrong_length(size, sum(widths))), widths)
        # cloned, because a view with a wider dtype must start at a multiple of its width
        return [piece.clone().view(dtype) for piece, dtype in zip(pieces, dtypes, strict=True)]

    def check(self, x: Tensor, ok: Any, message: str) -> Tensor:
        if isinstance(ok, Tensor) and ok.is_cuda:
            torch._assert_async(ok.all(), message)  # without a device synchronisation
        elif not (ok.all() if isinstance(ok, Tensor) else ok):
            raise ExchangeError(message)
        return x

    def _hash(self, seed: int, n: int) -> Tensor:
        """Return 32-bit hashes as int32, whose products wrap like unsigned ones; right shifts need a mask."""
        x = torch.arange(n, dtype=torch.int32, device=self.device).bitwise_xor_(_signed(seed))
        x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_signed(MIX[0]))
        x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).add_(_signed(second_key(seed))).mul_(_signed(MIX[1]))
        return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))

    def uniform(self, seed: int, n: int) -> Tensor:
        return (self._hash(seed, n) >> 8).bitwise_and_(0xFFFFFF).to(torch.float32).mul_(2**-24)

    def below(self, seed: int, bounds: Tensor) -> Tensor:
        return (self._hash(seed, bounds.numel()).to(torch.int64) & 0xFFFFFFFF) * bounds >> 32

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x, y, out=x) if x.dtype == y.dtype else x + y

    def subtract(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.sub(x, y, out=x)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x.mul_(factor)

    def subtract_products(self, x: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
        sizes = [p.shape[0] * q.shape[0] for p, q in zip(lefts, rights, strict=True)]
        for p, q, piece in zip(lefts, rights, self.split(x, sizes), strict=True):
            piece.view(p.shape[0], q.shape[0]).addmm_(p, q.T, alpha=-1)
        return x

    def on_host(self, function: Callable[..., Any], dtype: str, shape: Shape, *arrays: Tensor) -> Tensor:
        result = np.asarray(function(*(array.cpu().numpy() for array in arrays)), dtype)
        return torch.from_numpy(result.reshape(shape)).to(self.device)


class TorchCpuOps(CpuKernelOps, TorchOps):
    """Primitives in PyTorch with CPU kernels.

    Large tensors use numpy's memory, which has huge pages: the first write to PyTorch's own is several times slower.
    """

    def call(self, function: Callable[..., Sequence[Any]], *arrays: Any) -> list[Tensor]:
        given = [a.contiguous().numpy() if isinstance(a, Tensor) else a for a in arrays]
        return [torch.from_numpy(np.asarray(found)) for found in function(*given)]

    def zeros(self, shape: Shape, dtype: str) -> Tensor:
        return torch.from_numpy(np.empty(shape, dtype)).zero_()  # np.zeros would allocate small pages

    def project(self, x: Tensor, right: Tensor) -> Tensor:
        return x @ right.T.contiguous().T  # twice as fast in column-major order

    def project_back(self, x: Tensor, left: Tensor) -> Tensor:
        return (left.T @ x).T

    def products(self, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
        sizes = [p.shape[0] * q.shape[0] for p, q in zip(lefts, rights, strict=True)]
        flat = self.empty(sum(sizes), self.dtype(lefts[0]))
        for p, q, piece in zip(lefts, rights, self.split(flat, sizes), strict=True):
            torch.mm(p, q.T, out=piece.view(p.shape[0], q.shape[0]))
        return flat

    def empty(self, n: int, dtype: str) -> Tensor:
        return torch.from_numpy(self.room(n) if dtype == "float32" else np.empty(n, dtype))

    def absorb(self, buffer: Tensor, residual: Tensor, span: slice, grad: Tensor, scale: float) -> float | Tensor:
        if not (_fast(grad) and residual.dtype is torch.float32):
            return super().absorb(buffer, residual, span, grad, scale)
        start = 4 * span.start
        addresses = (buffer.data_ptr() + start, residual.data_ptr() + start, grad.data_ptr())
        return 0.0 if cpu.absorb_at(*addresses, grad.numel(), scale) else math.nan

    def deliver(self, total: EncodedSum, pieces: Sequence[tuple[slice, Tensor]], factor: float) -> float | Tensor:
        if not isinstance(total, Tensor) and not all(_fast(to) for _, to in pieces):
            total = dense(self, total)
        if isinstance(total, LowRankSum) and total.lefts[0].dtype is torch.float32:
            return _multiply(total, pieces, factor)
        if isinstance(total, SparseSum | QuantizedSum) and total.dtype == "float32":
            return 0.0 if deliver_parts(total, pieces, factor) else math.nan
        whole = dense(self, total)
        fast = [piece for piece in pieces if _fast(piece[1])] if whole.dtype is torch.float32 else []
        finite = not fast or Places.of(fast).write(whole.numpy(), 0, factor)
        others = [piece for piece in pieces if not _fast(piece[1])] if fast else pieces
        return super().deliver(whole, others, factor) if finite else math.nan

    def fill(self, buffer: Tensor, span: slice, grad: Tensor, scale: float) -> float:
        single = buffer.dtype is torch.float32
        if not single or grad.dtype is not torch.float32 or scale != 1 or not grad.is_contiguous():
            place = buffer[span]
            place.view(grad.shape).copy_(grad)
            grad = place if scale == 1 else place.div_(scale)
        if single:
            finite = cpu.put_finite_at(buffer.data_ptr() + 4 * span.start, grad.data_ptr(), grad.numel())
        elif not (finite := bool(grad.isfinite().all())):
            buffer[span].zero_()
        return 0.0 if finite else math.nan


def largest(tensors: Sequence[Tensor]) -> float | Tensor:
    """Return the largest magnitude in some tensors: a float on the CPU, else a scalar tensor."""
    peaks = [torch.linalg.vector_norm(x, ord=torch.inf).double() for x in tensors if x.numel()]
    if not peaks:
        return 0.0
    peak = torch.stack(peaks).max()
    return peak if peak.is_cuda else float(peak)


def _multiply(total: LowRankSum, pieces: Sequence[tuple[slice, Tensor]], factor: float) -> float | Tensor:
    """Write products, times a factor, to separate tensors; return a number as `TorchOps.deliver` does."""
    sizes = [p.shape[0] * q.shape[0] for p, q in zip(total.lefts, total.rights, strict=True)]
    lefts = torch._foreach_mul(list(total.lefts), factor)
    factors = dict(zip(accumulate(sizes, initial=0), zip(lefts, total.rights, strict=True), strict=False))
    for span, to in pieces:
        p, q = factors[span.start]
        torch.mm(p, q.T, out=to.view(p.shape[0], q.shape[0]))
    bound = float(largest(lefts)) * float(largest(total.rights)) * max(p.shape[1] for p in lefts)
    return (
        bound if bound < 1e38 else largest([to for _, to in pieces])
    )  # the bound takes one pass over the factors only


def _fast(x: Tensor) -> bool:
    """Return whether kernels can use the tensor in place."""
    return x.dtype is torch.float32 and x.is_contiguous()


def _signed(x: int) -> int:
    """Reinterpret a 32-bit unsigned number as int32."""
    return int(np.uint32(x).view(np.int32))
