"""Steps of DistributedDataParallel with the gradients of ResNet-50: time, launches, synchronisations, memory."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.core.bucket import Shape
from hvd_compress.distributed import Compression
from hvd_compress.tools.bench.distributed.shapes import resnet50

_spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]

SPECS = ["", "none", "fp16", "topk:ratio=0.01", "powersgd:rank=4", "qsgd", "efsignsgd"]
"""Methods; the empty one is DistributedDataParallel without a hook."""

SMALL = [(64, 64), (64,), (64, 64)]
WARMUP, STEPS = 5, 20
TIME_LIMIT = 100
"""Seconds of all methods with one backend."""

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


class Given(nn.Module):
    """Parameters whose gradients are given: computing them costs nothing.

    Args:
        shapes: Shapes of the parameters.
        seed: Seed of the gradients.
    """

    def __init__(self, shapes: list[Shape], seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        for number, shape in enumerate(shapes):
            self.register_buffer(f"gradient{number}", torch.randn(shape, generator=draw))

    def forward(self) -> Tensor:
        """Return a loss with these gradients."""
        products = [(weight * grad).sum() for weight, grad in zip(self.weights, self.buffers(), strict=True)]
        return torch.stack(products).sum()


def measure(backend: str, ranks: int, cpu: bool) -> list[dict[str, Any]]:
    """Return a row per method, as rank 0 measured it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = _spawn(_rank, (ranks, backend, cpu, folder), nprocs=ranks, join=False)
            deadline = time.monotonic() + TIME_LIMIT
            while not ended.join(timeout=1):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no end after {TIME_LIMIT} s")
        except Exception as error:
            return [*_written(folder), {"backend": backend, "ranks": ranks, "error": str(error)[-1000:]}]
        return _written(folder)


def _written(folder: str) -> list[dict[str, Any]]:
    path = Path(folder, "rows")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _rank(rank: int, ranks: int, backend: str, cpu: bool, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    for spec in SPECS:
        row = {"backend": backend, "ranks": ranks, "method": spec or "plain DDP", **_steps(spec, rank, cpu)}
        if rank == 0:
            with Path(folder, "rows").open("a") as file:
                file.write(json.dumps(row) + "\n")
    dist.barrier()
    os._exit(0)


def _steps(spec: str, rank: int, cpu: bool) -> dict[str, Any]:
    device = "cpu" if cpu else "cuda"
    shapes, count = (SMALL, 3) if cpu else (resnet50(), STEPS)
    module = Given(shapes, rank).to(device)
    model = DistributedDataParallel(module, broadcast_buffers=False, gradient_as_bucket_view=True)
    if spec:
        Compression.parse(spec).register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    for _ in range(2 if cpu else WARMUP):
        step()
    if not cpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(count):
        _wait(cpu)
        begin = time.perf_counter()
        step()
        _wait(cpu)
        seconds.append(time.perf_counter() - begin)
    if cpu:
        return {"ms": None}
    memory = torch.cuda.max_memory_allocated() / 2**20
    return {"ms": round(1000 * median(seconds), 2), "peak MiB": round(memory), **_counted(step)}


def _wait(cpu: bool) -> None:
    if not cpu:
        torch.cuda.synchronize()
    dist.barrier()


def _counted(step: Any) -> dict[str, int]:
    """Count the launches and synchronisations of a step."""
    with torch.profiler.profile() as profiler:
        step()
        torch.cuda.synchronize()
    found = {event.key: event.count for event in profiler.key_averages()}
    return {
        "launches": sum(found.get(name, 0) for name in LAUNCHES),
        "synchronisations": sum(found.get(name, 0) for name in WAITS) - 1,  # that of this function
        "copies from and to pageable memory": sum(n for name, n in found.items() if "Pageable" in name),
    }
