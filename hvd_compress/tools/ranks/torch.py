"""A rank in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import horovod.torch as hvd
import torch

from hvd_compress.tools.ranks.process import Device, settle
from hvd_compress.tools.ranks.rank import Rank


class TorchRank(Rank):
    def __init__(self, specs: Sequence[str], device: Device) -> None:
        super().__init__(hvd, specs, device)

    def gather(self, values: list[float]) -> list[list[float]]:
        """Return the values of all ranks."""
        settle(self.device)
        found: list[list[float]] = hvd.allgather(torch.tensor([values], dtype=torch.float64), name="gather").tolist()
        return found
