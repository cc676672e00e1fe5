"""A rank of a measurement with Horovod: ``python -m hvd_compress.tools.bench.distributed.torch_worker TASK``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import horovod.torch as hvd
import torch

from hvd_compress.engine.stats import Meter, Stats
from hvd_compress.tools.bench.distributed.measuring import measure
from hvd_compress.tools.bench.distributed.task import Entry, Task
from hvd_compress.tools.bench.distributed.torch_models import RATE, Loss, Models, ModelSubject, Tensor
from hvd_compress.tools.ranks.process import Device
from hvd_compress.tools.ranks.torch import TorchRank
from hvd_compress.torch import Compression

_NUMBERS = count(1)
"""Those of the entries, whose parameters need names of their own."""


@dataclass
class TorchSubject(ModelSubject):
    """An entry whose gradients Horovod reduces."""

    clock: Clock = field(kw_only=True)

    @property
    def called(self) -> float | None:
        return self.clock.seconds

    def synchronize(self) -> None:
        self.optimizer.synchronize()

    def stats(self) -> Stats | None:
        return self.clock.stats()


class Clock:
    """A compression whose calls are timed, without the time in which they wait."""

    def __init__(self, compression: Any) -> None:
        self._compression = compression
        self._meter = getattr(compression, "_meter", Meter())
        self.seconds = 0.0

    def compress(self, tensor: Tensor) -> Any:
        lap = self._meter.begin()
        result = self._compression.compress(tensor)
        self.seconds += self._meter.lap(lap)
        return result

    def decompress(self, tensor: Tensor, context: Any) -> Any:
        lap = self._meter.begin()
        result = self._compression.decompress(tensor, context)
        self.seconds += self._meter.lap(lap)
        return result

    def stats(self) -> Stats | None:
        return self._compression.stats() if hasattr(self._compression, "stats") else None


def reduced(entry: Entry, parameters: Sequence[Tensor], loss: Loss, exchange: bool = False) -> TorchSubject:
    """Let Horovod reduce the gradients of an entry."""
    clock, number = Clock(entry.compression(Compression, hvd.Compression)), next(_NUMBERS)
    named = [(f"entry{number}.{i}", parameter) for i, parameter in enumerate(parameters)]
    plain = torch.optim.SGD(parameters, lr=RATE)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, compression=clock)
    return TorchSubject(parameters, loss, optimizer, exchange, clock=clock)


class TorchBench(TorchRank):
    def __init__(self, specs: Sequence[str], device: Device) -> None:
        super().__init__(specs, device)
        self._models = Models(self.rank, self.device)

    def make(self, entry: Entry, what: str, model: str) -> ModelSubject:
        parameters, loss = self._models.make(what, model)
        if entry.spec:
            return reduced(entry, parameters, loss, what == "exchange")
        return ModelSubject(parameters, loss, torch.optim.SGD(parameters, lr=RATE), what == "exchange")


if __name__ == "__main__":
    measure(Task.from_json(sys.argv[1]), TorchBench)
