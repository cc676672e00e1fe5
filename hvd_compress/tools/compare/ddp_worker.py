"""A rank of a training with DistributedDataParallel; started as those of `torch_worker`, or by torchrun."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from hvd_compress.distributed import Compression, Gossip, LocalSteps
from hvd_compress.local.graph import gossips
from hvd_compress.local.settings import method_of
from hvd_compress.tools.compare.job import Job
from hvd_compress.tools.compare.torch_model import TorchModel
from hvd_compress.tools.compare.worker import main, merged
from hvd_compress.tools.ranks.group import GroupRank


class DDPTrainer(GroupRank, TorchModel):
    def distribute(self, spec: str, job: Job) -> None:
        self.restart()
        self.compression = Compression.parse(method_of(spec), **merged(spec, job))
        if "@" in spec:
            kind = Gossip if gossips(spec) else LocalSteps
            self.local = kind(self._plain, spec, compression=self.compression)
            return
        self._wrapped = DistributedDataParallel(self._training.model)
        if self.size > 1:
            self.compression.register(self._wrapped, optimizer=self._plain)

    def step(self, batch: Any) -> float:
        if self.local:
            return self.step_local(batch)
        self._plain.zero_grad()
        loss = self.loss(self._wrapped, batch)
        loss.backward()
        self._clip()
        self._plain.step()
        return float(loss.item())


if __name__ == "__main__":
    main("ddp", DDPTrainer)
