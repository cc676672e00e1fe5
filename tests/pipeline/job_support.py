"""What jobs of pipelines have in common: how they begin, a small model that is cut into stages, minibatches."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES, FEATURES, CLASSES = 12, 10, 3


def begin(link: str, replicas: int = 1) -> tuple[Any, int]:
    """Initialise what the link needs: Horovod or None, and the number of ranks."""
    torch.set_num_threads(1)
    if link == "mpi" and replicas == 1:
        from mpi4py import MPI

        return None, MPI.COMM_WORLD.Get_size()
    import horovod.torch as hvd

    hvd.init(process_sets="dynamic")
    return hvd, hvd.size()


def stages(count: int) -> list[nn.Module]:
    """A perceptron cut into stages; the same on every rank."""
    torch.manual_seed(1)
    widths = [FEATURES, *(16 + 4 * i for i in range(count - 1)), CLASSES]
    cut = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    return [*cut[:-1], cut[-1][0]]


def batch(step: int, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    """The minibatch of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (samples,), generator=generator)
