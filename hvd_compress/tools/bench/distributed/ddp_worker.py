"""A rank of a measurement with DistributedDataParallel; started as those of `torch_worker`, or by torchrun."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.distributed import Compression
from hvd_compress.engine.stats import Stats
from hvd_compress.tools.bench.distributed.measuring import measure
from hvd_compress.tools.bench.distributed.task import Entry, Task
from hvd_compress.tools.bench.distributed.torch_models import RATE, Loss, Models, ModelSubject, Tensor
from hvd_compress.tools.ranks.group import GroupRank
from hvd_compress.tools.ranks.process import Device

RANK = 4
"""The rank of PyTorch's PowerSGD."""

WHOLE = 100_000
"""MB of a bucket for all gradients."""


class Model(torch.nn.Module):
    """A loss as a module.

    Args:
        parameters: The parameters.
        loss: The loss of them.
    """

    def __init__(self, parameters: Sequence[Tensor], loss: Loss) -> None:
        super().__init__()
        self._all = torch.nn.ParameterList(parameters)
        self._loss = loss

    def forward(self) -> Tensor:
        return self._loss(list(self._all))


class DDPSubject(ModelSubject):
    """An entry whose gradients DistributedDataParallel reduces."""

    compressor: Any = None

    def stats(self) -> Stats | None:
        return self.compressor.stats() if self.compressor else None


class DDPBench(GroupRank):
    def __init__(self, specs: Sequence[str], device: Device) -> None:
        super().__init__(specs, device)
        self._models = Models(self.rank, self.device)

    def make(self, entry: Entry, what: str, model: str) -> ModelSubject:
        parameters, loss = self._models.make(what, model)
        if not entry.spec:
            return ModelSubject(parameters, loss, torch.optim.SGD(parameters, lr=RATE))
        if entry.driver == "horovod":
            from hvd_compress.tools.bench.distributed.torch_worker import reduced

            return reduced(entry, parameters, loss)
        return self._wrapped(entry, parameters, loss)

    def _wrapped(self, entry: Entry, parameters: Sequence[Tensor], loss: Loss) -> ModelSubject:
        # With several buckets, PyTorch's PowerSGD starts collectives in another order on each rank, and Gloo aborts.
        most = WHOLE if entry.own and entry.spec == "powersgd" else None
        wrapped = DistributedDataParallel(Model(parameters, loss), bucket_cap_mb=most, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(parameters, lr=RATE)
        subject = DDPSubject(parameters, lambda _: wrapped(), optimizer)
        if entry.own:
            _register(wrapped, entry.spec)
        else:
            subject.compressor = entry.compression(Compression, None).register(wrapped, optimizer=optimizer)
        return subject


def _register(model: DistributedDataParallel, name: str) -> None:
    """Register a hook of PyTorch's own; ``none`` has none."""
    if name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


if __name__ == "__main__":
    measure(Task.from_json(sys.argv[1]), DDPBench)
