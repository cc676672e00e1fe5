"""A rank of a training with DistributedDataParallel; started as those of `torch_worker`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.distributed import Compression
from hvd_compress.tools.compare.job import Job
from hvd_compress.tools.compare.torch_worker import TorchTrainer
from hvd_compress.tools.compare.worker import main, merged
from hvd_compress.tools.ranks import process_group


class DDPTrainer(TorchTrainer):
    def __init__(self, specs: Sequence[str]) -> None:
        super().__init__(specs)
        process_group.begin()

    def distribute(self, spec: str, job: Job) -> None:
        self.restart()
        self._wrapped = DistributedDataParallel(self._training.model)
        self.compression = Compression.parse(spec, **merged(spec, job))
        if hvd.size() > 1:
            self.compression.register(self._wrapped)

    def step(self, batch: Any) -> float:
        self._plain.zero_grad()
        loss = self._training.loss(self._wrapped, batch)
        loss.backward()
        self._clip()
        self._plain.step()
        return float(loss.item())


if __name__ == "__main__":
    main("ddp", DDPTrainer)
