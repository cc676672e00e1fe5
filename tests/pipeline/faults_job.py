"""What cannot be is an error on every stage, and nobody waits for ever. Arguments: link, cases.

Each rank prints the errors that it got: for each case there is a new pipeline, which does not know of the others.
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

link, cases = sys.argv[1], sys.argv[2:]
_, size = begin(link)


class Dying(nn.Module):
    """A stage that ends in the middle of the second step."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.calls = case, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 6:
            if self.case == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.case == "raises":
                raise ValueError("a bug in the model")
            if self.case == "hangs":
                time.sleep(1000)
        return x


def make(case: str) -> Pipeline:
    """A pipeline that will meet its case."""
    cut = stages(size)
    cut[1] = nn.Sequential(cut[1], Dying(case))
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK", "0")))
    spec = "topk:ratio=0.5" if case == "unlike" and rank == 1 else "topk:ratio=0.2"
    memory = {"shape": "ef", "ids": "aqsgd:samples=12"}.get(case, "none")
    return Pipeline(
        cut,
        nn.functional.cross_entropy,
        boundary=CompressedBoundary(spec, "topk:ratio=0.5", memory=memory),
        link=link,  # type: ignore[arg-type]
        timeout=4 if case == "hangs" else 60,
    )


def train(case: str, pipeline: Pipeline) -> None:
    """Two steps; the second has what the case is about."""
    for step in range(2):
        inputs, targets = batch(step, 10 if case == "shape" and step else 12)
        given = inputs[:3] if case == "few" and step else None if case == "nothing" and step else inputs
        pipeline.step(given, targets, torch.arange(12) + step if case == "ids" else None)


for case in cases:
    pipeline = make(case)
    try:
        train(case, pipeline)
        raise AssertionError(f"{case} went well")
    except (BoundaryError, ValueError) as error:
        print(f"{case} {pipeline.stage}: {type(error).__name__}: {error}", flush=True)
    try:
        train(case, pipeline)
    except BoundaryError as error:
        print(f"{case} {pipeline.stage} again: {error}", flush=True)

if "hangs" in cases:
    if pipeline.stage != 0:
        time.sleep(1000)  # the launcher ends all as soon as one ends: stage 0 first says what it met
    os._exit(3)  # the stage that hangs would never come to an end
if link == "mpi":
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()  # mpirun ends all as soon as one ends
