"""A rank of a training in PyTorch: ``python -m hvd_compress.tools.compare.torch_worker JOB``, as JSON."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import numpy.typing as npt
import torch

from hvd_compress.tools.compare.job import Job
from hvd_compress.tools.compare.training import Setting, Training
from hvd_compress.tools.compare.worker import main, merged
from hvd_compress.tools.ranks.torch import TorchRank
from hvd_compress.torch import Compression


class TorchTrainer(TorchRank):
    compression: Any

    def build(self, make: Callable[[Setting], Training], setting: Setting) -> Training:
        torch.manual_seed(setting.seed)
        self._training = make(setting)
        self._plain = self._training.optimizer
        self._before = copy.deepcopy([self._training.model.state_dict(), self._plain.state_dict()])
        self._seed = 1000 * (setting.seed + 1) + setting.rank
        return self._training

    def step_alone(self, batch: Any) -> None:
        self._plain.zero_grad()
        self._training.loss(self._training.model, batch).backward()
        self._clip()
        self._plain.step()

    def restart(self) -> None:
        """Undo the steps made alone, and give all ranks the same weights."""
        model = self._training.model
        model.load_state_dict(self._before[0])
        self._plain.load_state_dict(self._before[1])
        torch.manual_seed(self._seed)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def distribute(self, spec: str, job: Job) -> None:
        self.restart()
        self.compression = Compression.parse(spec, **merged(spec, job))
        with _even_alone():
            self._optimizer = hvd.DistributedOptimizer(
                self._plain, named_parameters=self._training.model.named_parameters(), compression=self.compression
            )

    def step(self, batch: Any) -> float:
        self._optimizer.zero_grad()
        loss = self._training.loss(self._training.model, batch)
        loss.backward()
        self._optimizer.synchronize()
        self._clip()
        with self._optimizer.skip_synchronize():
            self._optimizer.step()
        return float(loss.item())

    def _clip(self) -> None:
        if self._training.clip is not None:
            torch.nn.utils.clip_grad_norm_(self._training.model.parameters(), self._training.clip)

    def evaluate(self) -> float:
        model = self._training.model
        model.eval()
        with torch.no_grad():
            found = float(self._training.evaluate(model))
        model.train()
        return found

    def learning_rate(self) -> float:
        return float(self._plain.param_groups[0]["lr"])

    def weights(self) -> Iterator[npt.NDArray[Any]]:
        return (p.detach().cpu().numpy() for p in self._training.model.parameters() if p.requires_grad)


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
