"""Every method, registered on a model: weights on the GPU must be those on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gpu_check.steps import INPUT, Given, parallel
from hvd_compress.distributed import Compression
from hvd_compress.methods import REGISTRY
from hvd_compress.methods.base import Example

SPECS = [
    *(example.spec for name, cls in REGISTRY.items() for example in cls.examples or (Example(name),)),
    "fp16:feedback=on",
    "topk:ratio=0.05,values=fp16,feedback=ef21",
    "topk:ratio=0.05,momentum=0.5,nesterov=on",
    "dgc:ratio=0.05,momentum=0.5,warmup=4",
    "topk:ratio=0.05,every=2",
    "topk:ratio=0.05,delay=2",
]
"""Examples of all methods, and of each kind of memory."""

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
    for name, weights in _cases(rank).items():
        try:
            share = _differing(*(weights(device) for device in ("cpu", "cpu" if cpu else "cuda")))
            row: dict[str, Any] = {"method": name, "differ": round(share, 5)}
            if share > ALLOWED:
                row["error"] = f"more than {ALLOWED} of the weights differ"
        except Exception as error:
            row = {"method": name, "error": f"{type(error).__name__}: {error}"[:1000]}
        yield row


def _cases(rank: int) -> dict[str, Callable[[str], Tensor]]:
    """Return what trains a model on a device, and returns its weights."""
    cases: dict[str, Callable[[str], Tensor]] = {spec: partial(_replicated, spec, rank) for spec in SPECS}
    for dtype in (torch.bfloat16, torch.float16):
        cases |= {f"{spec} in {dtype}": partial(_replicated, spec, rank, dtype=dtype) for spec in IN_16_BITS}
    if dist.get_backend() != "gloo" or not torch.cuda.is_available():
        cases |= {f"{spec} with fully_shard": partial(_sharded, spec, rank) for spec in SHARDED}
    return cases


def _replicated(spec: str, rank: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    model = parallel(Given(SHAPES, rank).to(dtype), device)
    return _trained(spec, model)


def _sharded(spec: str, rank: int, device: str) -> Tensor:
    module = Given(SHAPES, rank).to(device)
    fully_shard(module, mesh=init_device_mesh(device, (dist.get_world_size(),)))
    return _trained(spec, module)


def _trained(spec: str, model: nn.Module) -> Tensor:
    """Return the weights after some steps."""
    Compression.parse(spec).register(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(INPUT).backward()
        optimizer.step()
    local = [w.to_local() if hasattr(w, "to_local") else w for w in model.parameters()]
    return torch.cat([weight.detach().float().view(-1) for weight in local]).cpu()


def _differing(a: Tensor, b: Tensor) -> float:
    return float((~torch.isclose(a, b, rtol=1e-2, atol=1e-3)).double().mean())
