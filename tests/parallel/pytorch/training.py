"""A small model, its training on stock Horovod, and questions to all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from hvd_compress.torch import Compression, TorchCompressor
from hvd_compress.torch.compressor import ReducingCompressor

SIZE = int(os.environ.get("HOROVOD_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"])
NODES = SIZE // int(os.environ.get("HOROVOD_LOCAL_SIZE") or os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
EVEN, ODD = hvd.ProcessSet(range(0, SIZE, 2)), hvd.ProcessSet(range(1, SIZE, 2))

LOSSLESS = ["topk:ratio=1.0", "randomk:ratio=1.0", "powersgd:rank=64,min_gain=0,min_size=0"]
"""Specs of methods that can be told not to lose anything."""


def make_model() -> nn.Sequential:
    """The same weights on all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 10))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Another batch for each rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + hvd.rank())
    x = torch.randn(16, 32, generator=generator)
    return x, x[:, :10].argmax(1)


class Job:
    """A model with its distributed optimizer.

    Args:
        compression: A compressor, or its spec: then with two buckets, as a search for better ones goes by the clock.
        model: The model.
        lr: Learning rate of SGD.
        momentum: Of SGD.
        optimizer: Makes another optimizer than SGD of the model.
        **options: Of `hvd.DistributedOptimizer`.
    """

    def __init__(
        self,
        compression: str | Any,
        model: nn.Module | None = None,
        lr: float = 0.1,
        momentum: float = 0.9,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        **options: Any,
    ) -> None:
        self.model = make_model() if model is None else model
        made = Compression.parse(compression, merge=2) if isinstance(compression, str) else compression
        self.compression: TorchCompressor = made
        sgd = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum)
        local = optimizer(self.model) if optimizer else sgd
        self.optimizer = hvd.DistributedOptimizer(
            local, named_parameters=self.model.named_parameters(), compression=made, **options
        )
        self.passes = options.get("backward_passes_per_step", 1)

    def backward(self, step: int, loss: Callable[..., Tensor] | None = None) -> None:
        """Compute the gradients of a step."""
        for part in range(self.passes):
            x, y = batch(step * self.passes + part)
            value = loss(self.model, x, y) if loss else nn.functional.cross_entropy(self.model(x), y)
            value.backward()  # type: ignore[no-untyped-call]

    def run(self, steps: range | int, loss: Callable[..., Tensor] | None = None) -> Job:
        """Train."""
        for step in range(steps) if isinstance(steps, int) else steps:
            self.backward(step, loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    @property
    def weights(self) -> Tensor:
        """All parameters, flat, as float64."""
        return torch.cat([p.detach().flatten().double() for p in self.model.parameters()])


def everyone(value: object) -> list[Any]:
    """The values of all ranks."""
    gathered: list[Any] = hvd.allgather_object(value)
    return gathered


def assert_ranks_equal(tensor: Tensor, process_set: Any = hvd.global_process_set) -> None:
    """All ranks hold the same bits."""
    # With a name: Horovod names others by counts of calls, which differ after an error that stops one rank earlier.
    for other in hvd.allgather(tensor[None], name="assert_ranks_equal", process_set=process_set):
        assert torch.equal(other, tensor)


def leaves_of(compression: ReducingCompressor) -> dict[str, Tensor]:
    """The state of a compressor as flat leaves; empty for methods without any."""
    sessions = compression.state_dict()["sessions"].items()
    slots = [(f"{label}.{key}", leaves) for label, session in sessions for key, leaves in session["buckets"].items()]
    return {f"{key}.{path}": torch.as_tensor(leaf) for key, leaves in slots for path, leaf in leaves.items()}
