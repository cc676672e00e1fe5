"""A rank that ends early does not take those down that are still at work, where Horovod initialised MPI."""

from __future__ import annotations

import horovod.torch as hvd
import torch
from job_support import batch, stages
from torch import nn

from hvd_compress.errors import BoundaryError
from hvd_compress.pipeline.torch import Pipeline

hvd.init()  # before mpi4py: so MPI is Horovod's, which finalizes it once one rank has ended
torch.set_num_threads(1)
pipeline = Pipeline(stages(hvd.size()), nn.functional.cross_entropy, link="mpi")
inputs, targets = batch(0)
pipeline.step(inputs, targets)
print(f"all is well on rank {hvd.rank()}", flush=True)
if hvd.rank() == 0:
    from mpi4py import MPI

    while not MPI.Is_finalized():
        pass
    try:
        pipeline.step(inputs, targets)
    except BoundaryError as error:
        print(f"then: {error}", flush=True)
