"""A rank of a training in PyTorch: ``python -m hvd_compress.tools.compare.torch_worker JOB``, as JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd

from hvd_compress.local.settings import method_of
from hvd_compress.tools.compare.job import Job
from hvd_compress.tools.compare.torch_model import TorchModel
from hvd_compress.tools.compare.worker import main, merged
from hvd_compress.tools.ranks.torch import TorchRank
from hvd_compress.torch import Compression, LocalSteps


class TorchTrainer(TorchRank, TorchModel):
    def distribute(self, spec: str, job: Job) -> None:
        self.restart()
        hvd.broadcast_parameters(self._training.model.state_dict(), root_rank=0)
        self.compression = Compression.parse(method_of(spec), **merged(spec, job))
        if "@" in spec:
            self.local = LocalSteps(self._plain, spec, compression=self.compression)
            return
        with _even_alone():
            self._optimizer = hvd.DistributedOptimizer(
                self._plain, named_parameters=self._training.model.named_parameters(), compression=self.compression
            )

    def step(self, batch: Any) -> float:
        if self.local:
            return self.step_local(batch)
        self._optimizer.zero_grad()
        loss = self.loss(self._training.model, batch)
        loss.backward()
        self._optimizer.synchronize()
        self._clip()
        with self._optimizer.skip_synchronize():
            self._optimizer.step()
        return float(loss.item())


@contextmanager
def _even_alone() -> Iterator[None]:
    """Let Horovod's optimizer do its work where there is one rank only, as it does in elastic jobs."""
    if hvd.size() > 1:
        yield
        return
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        yield
    finally:
        del os.environ["HOROVOD_ELASTIC"]


if __name__ == "__main__":
    main("torch", TorchTrainer)
