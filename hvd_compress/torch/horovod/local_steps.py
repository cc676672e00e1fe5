"""Local steps over Horovod."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import horovod.torch as hvd
from torch import Tensor
from torch.optim import Optimizer

from hvd_compress.local.base import Over
from hvd_compress.local.settings import LocalOptions, compressor, settings
from hvd_compress.local.stepper import LocalStepper
from hvd_compress.torch.horovod import caller
from hvd_compress.torch.horovod.compression import Compression, TorchCompressor
from hvd_compress.torch.horovod.transport import HorovodTransport
from hvd_compress.torch.optimizer_stepper import OptimizerStepper


class LocalSteps(OptimizerStepper, LocalStepper):
    """Train alone for some steps, then average; see `hvd_compress.distributed.LocalSteps`.

    The optimizer is that of PyTorch, without ``hvd.DistributedOptimizer``. Horovod's direct calls wait, so with
    ``delay`` an exchange does not overlap with the next steps.

    Args:
        optimizer: The optimizer of the model on this rank.
        spec: ``"diloco"``, ``"streaming"`` or ``"sparseloco"``.
        process_set: The ranks that average; None for all.
        **options: See `hvd_compress.local.settings.LocalSettings`.

    Raises:
        SpecError: If an option is unknown or its value is not allowed.
        UnsupportedError: If the optimizer is not one of PyTorch.
    """

    def __init__(
        self, optimizer: Optimizer, spec: str = "", process_set: Any = None, **options: Unpack[LocalOptions]
    ) -> None:
        chosen = settings(spec, options)
        compression = compressor(chosen.compression, Compression.parse, TorchCompressor, "hvd_compress.torch")
        super().__init__(optimizer, chosen, compression, HorovodTransport.of(process_set or caller.EVERYONE))

    def _start(self, arrays: Sequence[Tensor], name: str) -> Over:
        assert isinstance(self._transport, HorovodTransport)
        where = {"name": name, "process_set": self._transport.process_set}
        return Over(hvd.grouped_allreduce(list(arrays), op=hvd.Average, compression=self._compression, **where))
