"""What cannot be is an error on every stage, and nobody waits for ever. Arguments: link, case.

Each rank prints the error that it got.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from job_support import batch, begin, stages
from torch import Tensor, nn

from hvd_compress.errors import BoundaryError
from hvd_compress.pipeline.torch import CompressedBoundary, Pipeline

link, case = sys.argv[1:]
_, size = begin(link)
MEMORY = {"shape": "ef", "ids": "aqsgd:samples=12"}.get(case, "none")


class Dying(nn.Module):
    """A stage that ends in the middle of the second step."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 6:
            if case == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if case == "raises":
                raise ValueError("a bug in the model")
            if case == "hangs":
                time.sleep(1000)
        return x


cut = stages(size)
cut[1] = nn.Sequential(cut[1], Dying())
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK", "0")))
spec = "topk:ratio=0.5" if case == "unlike" and rank == 1 else "topk:ratio=0.2"
pipeline = Pipeline(
    cut,
    nn.functional.cross_entropy,
    boundary=CompressedBoundary(spec, "topk:ratio=0.5", memory=MEMORY),
    link=link,  # type: ignore[arg-type]
    timeout=4 if case == "hangs" else 60,
)


def steps() -> None:
    """Two steps; the second has what the case is about."""
    for step in range(2):
        inputs, targets = batch(step, 10 if case == "shape" and step else 12)
        ids = torch.arange(12) + step if case == "ids" else None
        few = 3 if case == "few" and step else None
        pipeline.step(
            inputs[:few] if pipeline.is_first and not (case == "nothing" and step) else None,
            targets if pipeline.is_last else None,
            ids if pipeline.is_first else None,
        )


try:
    steps()
    raise AssertionError("it went well")
except (BoundaryError, ValueError) as error:
    print(f"{pipeline.stage}: {type(error).__name__}: {error}", flush=True)
try:
    steps()
except BoundaryError as error:
    print(f"{pipeline.stage} again: {error}", flush=True)
if case == "hangs":
    os._exit(3)  # the other stage would never come to an end
if link == "mpi":
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()  # mpirun ends all as soon as one ends
