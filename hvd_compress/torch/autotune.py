"""`hvd_compress.engine.autotune` with tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hvd_compress.engine import autotune
from hvd_compress.engine.bucket_autotune import Search
from hvd_compress.engine.race import Race
from hvd_compress.torch.waiting import wait
from hvd_compress.transport.protocol import Handle


class Tuner(autotune.Tuner):
    """Time the steps of an optimizer, and choose the partition or the method of the next one.

    Args:
        search: The search of a partition, or the race of methods.
        label: Label of the reducer, part of the names of its collectives.
        device: Device of the gradients.
    """

    def __init__(self, search: Search | Race, label: str, device: torch.device) -> None:
        super().__init__(search, label)
        self._device = device

    def numbers(self, values: Sequence[float]) -> Tensor:
        """Return a tensor of float64 in the memory of the CPU."""
        return torch.tensor(values, dtype=torch.float64, device="cpu")

    def zeros(self, count: int) -> Tensor:
        """Return a tensor of float32 where the gradients are."""
        return torch.zeros(count, dtype=torch.float32, device=self._device)

    def wait(self, handle: Handle, sleep: Callable[[float], object]) -> Tensor:
        """Return the reply of a collective; sleep by the given function while it has not come."""
        return wait(handle, sleep)
