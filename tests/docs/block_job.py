"""Run the documents' blocks of Python, in order, on one rank of a training with compression."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import horovod.torch as hvd
import numpy as np
import torch
import torch.distributed as dist
from docs.documents import blocks, expecting, starts_a_job

import hvd_compress.distributed
from hvd_compress.torch import Compression


def expect(value: object, written: str) -> None:
    """Fail unless a value is the one in the document."""
    shown = f"{value:.{len(written.partition('.')[2])}f}" if isinstance(value, float) else repr(value)
    assert shown == written, f"{shown} is not {written}"


def of_ddp() -> dict[str, object]:
    """Return the names of a training with DistributedDataParallel, after its first step."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    compression = hvd_compress.distributed.Compression.topk(ratio=0.1).register(model)
    model(torch.ones(4, 64)).square().mean().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    return {"model": model, "compression": compression, "optimizer": optimizer}


def of_gan() -> dict[str, object]:
    """Return the names of a GAN with DistributedDataParallel."""
    nets = [torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64)) for _ in range(2)]
    found: dict[str, object] = {"compression": hvd_compress.distributed.Compression.topk(ratio=0.1)}
    for name, net in zip(("generator", "discriminator"), nets, strict=True):
        found |= {name: net, f"{name}_optimizer": torch.optim.Adam(net.parameters(), betas=(0.0, 0.999))}
    return {**found, "generator_loss": nets[1](nets[0](torch.ones(4, 64))).mean()}


def main(folder: str) -> None:
    """Give each block the names of a training, and those that earlier blocks of its document have defined."""
    hvd.init()
    os.chdir(folder)
    place = hvd.broadcast_object(f"{folder}/group")
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=hvd.rank(), world_size=hvd.size())
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    compression = Compression.topk(ratio=0.1, merge=1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), compression=compression
    )
    scaler = torch.amp.GradScaler("cpu")
    names = {"Compression": Compression, "compression": compression, "model": model, "optimizer": optimizer}
    names["checkpoint"] = "checkpoints/step-1000"
    scopes: dict[Path, dict[str, object]] = {}
    for block in blocks("python"):
        if starts_a_job(block):
            continue
        scope = scopes.setdefault(
            block.document, {**names, "expect": expect, "hvd": hvd, "np": np, "torch": torch, "scaler": scaler}
        )
        optimizer.zero_grad()
        loss = model(torch.ones(4, 64)).square().mean()
        if ".backward()" not in block.text:
            loss.backward()
            optimizer.step()
        scope["loss"] = loss
        if "hvd_compress.distributed" in block.text:
            scope = {**scope, **of_ddp()}
        if "discriminator" in block.text:
            scope = {**scope, **of_gan()}
        exec(compile(expecting(block.text), str(block), "exec"), scope)
        hvd.allreduce(torch.zeros(1), name=str(block))  # wait until all ranks have saved
        print(f"{block} ran on rank {hvd.rank()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
