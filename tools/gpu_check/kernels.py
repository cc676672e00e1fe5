"""Kernels: their time in units of a copy, and races between streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hvd_compress.ops.code import Code
from hvd_compress.ops.kernels import cuda
from hvd_compress.ops.moments import sides_of, size_of
from hvd_compress.ops.torch_cuda import TorchCudaOps

LARGE, TINY = 25_557_032, 3_000
"""Elements: the gradients of ResNet-50, and what an interpreter can do."""

CODES = {
    "qsgd 4 bits": Code("max", 4, 512),
    "block8": Code("max", 8, 128, dither=False),
    "fp8 e4m3": Code("e4m3", 8, 1024, dither=False),
    "efsignsgd": Code("mean", 1, 1024),
    "bf16": Code("bfloat16", 16),
    "ctk": Code("top", 2, 1024, ratio=0.03),
}
RUNS, STREAMS, ROUNDS = 20, 4, 50
BUSY = 4096
"""Rows of matrices whose product keeps the device busy while kernels are launched: that may take longer than they."""


def measure(cpu: bool) -> list[dict[str, Any]]:
    """Return a row per kernel: milliseconds, and the ratio to a copy of the array; None on the CPU."""
    x = torch.randn(TINY if cpu else LARGE, device="cpu" if cpu else "cuda")
    copy = torch.empty_like(x)
    base = _milliseconds(lambda: copy.copy_(x), cpu)
    rows = []
    for name, run in _operations(x):
        taken = _milliseconds(run, cpu)
        copies = round(taken / base, 2) if taken and base else None
        rows.append({"kernel": name, "ms": taken, "copies": copies})
    return rows


def _operations(x: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the operations; none of them changes ``x``."""
    k = x.numel() // 100
    room, residual = torch.empty_like(x), torch.randn_like(x)
    yield "fill", lambda: cuda.put_finite(room, x)
    yield "absorb", lambda: cuda.put_finite(room, x, residual)
    yield "kth_magnitude", lambda: cuda.kth_magnitude(x, k)
    yield "top_indices", lambda: cuda.top_indices(x, k)
    yield "torch.topk of the magnitudes", lambda: torch.topk(x.abs(), k, sorted=False)
    for name, code in CODES.items():
        data = cuda.quantise(x, code, 1)[0].reshape(1, -1)
        yield f"encode {name}", partial(cuda.quantise, x, code, 1)
        yield f"encode {name}, keep the error", partial(cuda.quantise, x, code, 1, True, room)
        yield f"decode {name}", partial(cuda.dequantise, data, code, x.numel())
    yield "rotate (thc)", lambda: cuda.rotate(x, 1, 1024)
    matrix, thin = x[: x.numel() // 1000 * 1000].view(-1, 1000), torch.randn(1000, 4, device=x.device)
    ops = TorchCudaOps(x.device)
    yield "project (powersgd)", lambda: ops.project(matrix, thin)
    sides = [sides_of((len(matrix), 1000))]
    second = torch.zeros(size_of(sides[0]), device=x.device)
    yield "precondition", lambda: ops.precondition(matrix.reshape(-1), second, sides, 0.95)


def _milliseconds(run: Callable[[], object], cpu: bool) -> float | None:
    """Return the median time on the device."""
    run()
    if cpu:
        return None
    busy = torch.ones(BUSY, BUSY, device="cuda")
    found = []
    for _ in range(RUNS):
        begin, end = torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)
        torch.mm(busy, busy)
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(float(begin.elapsed_time(end)))
    return round(median(found), 4)


def races() -> int:
    """Encode and decode on several streams at a time, and count the results that differ from those of one stream."""
    xs = [torch.randn(1_000_003, device="cuda") for _ in range(STREAMS)]
    wrong = 0
    for code in CODES.values():
        expected = [_round_trip(x, code) for x in xs]
        torch.cuda.synchronize()
        streams: list[Any] = [torch.Stream("cuda") for _ in xs]
        for _ in range(ROUNDS):
            found = []
            for x, stream in zip(xs, streams, strict=True):
                with stream:
                    found.append(_round_trip(x, code))
            torch.cuda.synchronize()
            wrong += sum(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return wrong


def _round_trip(x: Tensor, code: Code) -> Tensor:
    return cuda.dequantise(cuda.quantise(x, code, 1)[0].reshape(1, -1), code, x.numel())
