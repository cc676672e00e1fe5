"""Whole steps of DistributedDataParallel: time, launches, synchronisations, memory."""

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
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.distributed import Compression

_spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]

SPECS = ["", "none", "fp16", "topk:ratio=0.01", "powersgd:rank=4", "qsgd", "efsignsgd"]
"""Methods; the empty one is DistributedDataParallel without a hook."""

WIDTH, LAYERS, BATCH = 1024, 24, 64
WARMUP, STEPS = 5, 20
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def measure(backend: str, ranks: int, cpu: bool) -> list[dict[str, Any]]:
    """Return a row per method, as rank 0 measured it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            _spawn(_rank, (ranks, backend, cpu, folder), nprocs=ranks)
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
    width, layers, count = (64, 3, 3) if cpu else (WIDTH, LAYERS, STEPS)
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*parts).to(device), gradient_as_bucket_view=True)
    if spec:
        Compression.parse(spec).register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(rank)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
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
    }
