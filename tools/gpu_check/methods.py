"""Every method, registered on a model: weights on the GPU must be those on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import catalogue
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gpu_check.steps import Given, stepper
from hvd_compress.distributed import Compression

SPECS = list(dict.fromkeys([*catalogue.EXAMPLES, *catalogue.SPECS, *catalogue.WARMING_UP]))
"""The specs of the tests: every method, every way to communicate, and every kind of memory."""

IN_16_BITS = ["topk:ratio=0.1", "qsgd", "efsignsgd", "powersgd:rank=2"]
"""Those that are tried with parameters of 16 bits, too."""

SHARDED = ["bf16", "qsgd:bits=8", "loco", "fp8", "block8"]
"""Those that are tried with ``fully_shard``, over NCCL."""

SHAPES = [(300, 200), (64,), (100, 100)]
STEPS = 3
ALLOWED = 0.01
"""Share of weights that may differ: where sums are about to be rounded, another order of additions shows."""


def compare(rank: int, cpu: bool) -> Iterator[dict[str, Any]]:
    """Yield a row per method: the share of weights that differ, or the error."""
    for name, weights in _cases(rank, cpu).items():
        try:
            share = _differing(*(weights(device) for device in ("cpu", "cpu" if cpu else "cuda")))
            row: dict[str, Any] = {"method": name, "differ": round(share, 5)}
            if share > ALLOWED:
                row["error"] = f"more than {ALLOWED} of the weights differ"
        except Exception as error:
            row = {"method": name, "error": f"{type(error).__name__}: {error}"[:1000]}
        yield row


def _cases(rank: int, cpu: bool) -> dict[str, Callable[[str], Tensor]]:
    """Return the trainings by name: functions from a device to the weights."""
    cases: dict[str, Callable[[str], Tensor]] = {spec: partial(_replicated, spec, rank) for spec in SPECS}
    for dtype in (torch.bfloat16, torch.float16):
        cases |= {f"{spec} in {dtype}": partial(_replicated, spec, rank, dtype=dtype) for spec in IN_16_BITS}
    if cpu or dist.get_backend() != "gloo":
        cases |= {f"{spec} with fully_shard": partial(_sharded, spec, rank) for spec in SHARDED}
    return cases


def _replicated(spec: str, rank: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    model = Given(SHAPES, rank, device, dtype)
    return _trained(spec, DistributedDataParallel(model, gradient_as_bucket_view=True))


def _sharded(spec: str, rank: int, device: str) -> Tensor:
    model = Given(SHAPES, rank, device)
    fully_shard(model, mesh=init_device_mesh(device, (dist.get_world_size(),)))
    return _trained(spec, model)


def _trained(spec: str, model: nn.Module) -> Tensor:
    """Return the weights after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    Compression.parse(spec).register(model, optimizer=optimizer)
    step = stepper(model, optimizer)
    for _ in range(STEPS):
        step()
    local = [w.to_local() if hasattr(w, "to_local") else w for w in model.parameters()]
    return torch.cat([weight.detach().float().view(-1) for weight in local]).cpu()


def _differing(a: Tensor, b: Tensor) -> float:
    return float((~torch.isclose(a, b, rtol=1e-2, atol=1e-3)).double().mean())
