"""A rank of `test_fsdp_replicas.py`: two nodes of two ranks train by PyTorch's own HSDP, and with compression."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hvd_compress.distributed import Compression

store, shards, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
mesh = init_device_mesh("cpu", (4 // shards, shards), mesh_dim_names=("replicate", "shard"))


def train(spec: str) -> Tensor:
    """Train six steps, and return all weights; PyTorch's own HSDP without a spec."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(32, 49), nn.ReLU(), nn.Linear(49, 10))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh["shard"] if spec else mesh)
    compression = Compression.parse(spec or "none")
    if spec:
        compression.register(model, replicas=mesh["replicate"].get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    if spec:
        assert (compression.stats().bytes_inside > 0) == ("hierarchical" in spec and shards == 1), spec
    return torch.cat([p.full_tensor().flatten() for p in model.parameters()]).detach()


plain = train("")
flat = ["none", "topk:ratio=1.0", "powersgd:rank=32,min_gain=0", "topk:ratio=0.05"]
for spec in [*flat, *(f"{spec},hierarchical=on" for spec in flat[1:])]:
    weights = train(spec)
    everyone = [torch.empty_like(weights) for _ in range(4)]
    dist.all_gather(everyone, weights)
    assert all(torch.equal(weights, other) for other in everyone), spec
    if not spec.startswith("topk:ratio=0.05"):
        torch.testing.assert_close(weights, plain, rtol=1e-4, atol=1e-5)
print("trained", flush=True)
dist.barrier()
os._exit(0)
