"""Steps of DistributedDataParallel with the gradients of ResNet-50: time, launches, synchronisations, memory."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.distributed import Compression
from hvd_compress.ops.arrays import Shape
from hvd_compress.tools.bench.distributed.shapes import resnet50

Register: TypeAlias = Callable[[DistributedDataParallel, torch.optim.Optimizer], object]
"""Registers a method on a model."""

Work: TypeAlias = Callable[[int, bool], Iterable[dict[str, Any]]]
"""Program of a rank: takes the rank, and whether to run on the CPU; returns rows of results."""

_spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]

SPECS = ["none", "fp16", "topk:ratio=0.01", "powersgd:rank=4", "qsgd", "efsignsgd", "topkc:ratio=0.01", "int8"]
SPECS += ["ctk", "ctk:preconditioned=on"]

NCCL = "cpu:gloo,cuda:nccl"
"""Backend of jobs over NCCL."""

SMALL = [(64, 64), (64,), (64, 64)]
WARMUP, STEPS = 4, 10
TIME_LIMIT = 200
"""Seconds of all methods with one backend."""

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


class Given(nn.Module):
    """Parameters whose gradients are given: computing them costs nothing. The input is ignored; FSDP2 expects one.

    Args:
        shapes: Shapes of the parameters.
        seed: Seed of the gradients.
        device: Device of both.
        dtype: Dtype of both.
    """

    def __init__(self, shapes: list[Shape], seed: int, device: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(torch.zeros(shape, device=device, dtype=dtype) for shape in shapes)
        self.gradients = [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]

    def forward(self, x: Tensor) -> Tensor:
        """Return a loss with these gradients."""
        products = [(weight * grad).sum() for weight, grad in zip(self.weights, self.gradients, strict=True)]
        return torch.stack(products).sum()


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that trains `Given` for one step."""
    x = torch.zeros(1)

    def step() -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    return step


def measure(rank: int, cpu: bool) -> Iterator[dict[str, Any]]:
    """Yield a row per method, with what PyTorch brings before them."""
    methods = _peers() | {spec: partial(_register, spec) for spec in SPECS}
    for name, register in methods.items():
        yield {"method": name, **_steps(register, rank, cpu)}


def _peers() -> dict[str, Register]:
    """Return what PyTorch brings; its PowerSGD over NCCL only, as over Gloo it hangs with tensors of a GPU."""
    peers: dict[str, Register] = {
        "plain DDP": lambda model, optimizer: None,
        "PyTorch's fp16 hook": lambda model, optimizer: model.register_comm_hook(None, fp16_compress_hook),
    }
    if dist.get_backend() != "gloo":
        state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        peers["PyTorch's PowerSGD, rank 4"] = lambda model, optimizer: model.register_comm_hook(state, powerSGD_hook)
    return peers


def _register(spec: str, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    Compression.parse(spec).register(model, optimizer=optimizer)


def on_ranks(work: Work, backend: str, ranks: int, cpu: bool) -> list[dict[str, Any]]:
    """Return the rows of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        job = _spawn(_rank, (work, ranks, backend, cpu, folder), nprocs=ranks, join=False)
        try:
            deadline = time.monotonic() + TIME_LIMIT
            while not job.join(timeout=1):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no end after {TIME_LIMIT} s")
        except Exception as error:
            return [*_written(folder), {"backend": backend, "ranks": ranks, "error": str(error)[-1000:]}]
        finally:
            for process in job.processes:
                process.kill()
        return _written(folder)


def _written(folder: str) -> list[dict[str, Any]]:
    path = Path(folder, "rows")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _rank(rank: int, work: Work, ranks: int, backend: str, cpu: bool, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    for row in work(rank, cpu):
        if rank == 0:
            with Path(folder, "rows").open("a") as file:
                file.write(json.dumps({"backend": backend, "ranks": ranks, **row}) + "\n")
    dist.barrier()
    os._exit(0)


def _steps(register: Register, rank: int, cpu: bool) -> dict[str, Any]:
    gc.collect()  # the model before, whose memory would count
    before = 0 if cpu else torch.cuda.memory_allocated()
    shapes, count = (SMALL, 3) if cpu else (resnet50(), STEPS)
    model = DistributedDataParallel(Given(shapes, rank, "cpu" if cpu else "cuda"), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    register(model, optimizer)
    step = stepper(model, optimizer)
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
    memory = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {"ms": round(1000 * median(seconds), 2), "peak MiB": round(memory), **_counted(step)}


def _wait(cpu: bool) -> None:
    if not cpu:
        torch.cuda.synchronize()
    dist.barrier()


def _counted(step: Any) -> dict[str, int]:
    """Count the launches and synchronisations of a step."""
    with torch.profiler.profile(acc_events=True) as profiler:
        step()
        torch.cuda.synchronize()
    found = {event.key: event.count for event in profiler.key_averages()}
    return {
        "launches": sum(found.get(name, 0) for name in LAUNCHES),
        "synchronisations": sum(found.get(name, 0) for name in WAITS) - 1,  # that of this function
        "copies from and to pageable memory": sum(n for name, n in found.items() if "Pageable" in name),
    }
