"""Programs on Horovod's optimizers for PyTorch."""

from __future__ import annotations

import gc
import time
from contextlib import AbstractContextManager
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.mpi_ops import mpi_lib
from laws.law import violation
from laws.program import ALL, FAMILIES, Able, Program, Step
from laws.torch_rank import OptimizerRank, method_of
from torch import nn

from hvd_compress.torch import TorchCompressor
from hvd_compress.torch.waiting import nap

ABLE = Able(
    FAMILIES,
    fates=("applied", "not finite", "discarded"),
    before=("renewed", "resumed"),
    events=ALL,
    idle=True,
    chooses=True,
)


class HorovodRank(OptimizerRank):
    """A rank of Horovod."""

    def compressor(self) -> TorchCompressor:
        return TorchCompressor(method_of(self.program), self.program.merge)

    def renewed(self) -> None:
        self.optimizers = {}
        gc.collect()  # an old one must not go on reducing
        super().renewed()

    def optimizer(self, model: int, parameters: dict[str, nn.Parameter]) -> Any:
        return hvd.DistributedOptimizer(
            torch.optim.SGD(parameters.values(), lr=0.1), parameters.items(), compression=self.compression
        )

    def during(self, step: Step, part: int) -> AbstractContextManager[object]:
        for optimizer in self.optimizers.values() if not part else ():
            optimizer.set_backward_passes_per_step(step.passes)
        return super().during(step, part)


def start() -> bool:
    """Join the job; return whether this process speaks for all ranks."""
    torch.set_num_threads(1)
    wait_and_clear = mpi_lib.horovod_torch_wait_and_clear

    def wait(handle: int) -> None:
        """Wait asleep, as there may be more ranks than cores."""
        begin = time.monotonic()
        while not mpi_lib.horovod_torch_poll(handle):
            nap(begin)
        wait_and_clear(handle)

    mpi_lib.horovod_torch_wait_and_clear = wait
    hvd.init()
    return bool(hvd.rank() == 0)


def run(program: Program) -> str:
    """Run a program; return how it breaks the law on any rank."""
    delivered = HorovodRank(program, hvd.rank()).run()
    return next(filter(None, hvd.allgather_object(violation(program, delivered))), "")
