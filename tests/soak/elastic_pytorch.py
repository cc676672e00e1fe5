"""One worker of an elastic job (PyTorch): one of them is killed, another one joins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import horovod.torch as hvd
import torch
from parallel.pytorch.training import batch, make_model
from soak.elastic import Diary, Scene
from torch import nn

from hvd_compress.torch import Compression


def main(folder: str, spec: str) -> None:
    """Train; what happens when is in `Scene`."""
    hvd.init()
    torch.set_num_threads(1)
    scene = Scene(Path(folder))
    model = make_model()
    compression = Compression.parse(spec)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters(), compression=compression
    )
    diary = Diary(scene)

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        diary.enter(hvd.rank(), hvd.size(), state.step)
        while state.step < scene.steps:
            scene.before(state.step)
            x, y = batch(state.step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            state.step += 1
            if state.step % scene.commit_every == 0:
                state.commit()

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    diary.end(hvd.rank(), bool((hvd.allgather(weights[None]) == weights).all()))


if __name__ == "__main__":
    main(*sys.argv[1:])
