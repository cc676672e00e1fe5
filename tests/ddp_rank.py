"""A rank of `test_ddp_faults.py`: rank 1 ends or stalls before its fourth step; rank 0 prints its error."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.distributed import Compression, Gossip, LocalSteps

store, rank, spec, fault, kind = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
patience = timedelta(seconds=5)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=patience)
model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if kind == "local":
    LocalSteps(optimizer, every=4, delay=1, compression=spec)
elif kind == "gossip":
    Gossip(optimizer, compression=spec)
elif kind == "sharded":
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    Compression.parse(spec).register(model)
else:
    model = DistributedDataParallel(model)
    Compression.parse(spec).register(model)
try:
    for step in range(6):
        if rank == 1 and step == 3:
            if fault == "stall":
                time.sleep(60)
            os._exit(1)
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
except RuntimeError as error:
    print(f"step {step}: {error}", flush=True)
    os._exit(0)
print("no error", flush=True)
os._exit(1)
