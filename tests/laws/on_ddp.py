"""Programs on DistributedDataParallel."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist
from laws.law import violation
from laws.program import ALL, FAMILIES, Able, Program, Step
from laws.torch_rank import PlaceholderTerms, TorchRank, method_of
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.distributed.compression import DistributedCompressor

ABLE = Able(
    FAMILIES,
    settings=((2, 1, "channels"),),
    fates=("applied", "not finite", "discarded"),
    before=("renewed", "resumed"),
    events=ALL - {"optimizers", "turned"},
    last_pass=True,
    chooses=True,
)


class DdpRank(TorchRank):
    """A rank whose models are wrapped in DistributedDataParallel."""

    wrapped: list[DistributedDataParallel]
    optimizers: list[torch.optim.Optimizer]

    def compressor(self) -> DistributedCompressor:
        return DistributedCompressor(method_of(self.program), self.program.merge)

    def renewed(self) -> None:
        self.wrapped, self.optimizers = [], []
        gc.collect()  # an old one must not go on reducing
        unused, small = not self.program.always_used, 1e-3 * (self.program.seed % 5)
        for net in self.nets:
            net.requires_grad_(True)
            model = DistributedDataParallel(net, find_unused_parameters=unused, bucket_cap_mb=small or None)
            self.optimizers.append(torch.optim.SGD(net.parameters(), lr=0.1))
            self.compression.register(model, optimizer=self.optimizers[-1])
            self.wrapped.append(model)

    def forward(self, model: int, terms: PlaceholderTerms) -> Tensor:
        loss: Tensor = self.wrapped[model](terms)
        return loss

    def during(self, step: Step, part: int) -> AbstractContextManager[object]:
        stack = ExitStack()
        for use in step.uses if part < step.passes - 1 else ():
            stack.enter_context(self.wrapped[use.model].no_sync())
        return stack

    def finish(self, step: Step) -> None:
        for use in step.uses:
            if use.fate == "applied":
                self.optimizers[use.model].step()
            if use.fate == "discarded":
                self.compression.discard(self.wrapped[use.model])


def start() -> bool:
    """Join the job; return whether this process speaks for all ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist.get_rank() == 0


def everyone(value: str) -> list[Any]:
    """Return the values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def run(program: Program) -> str:
    """Run a program; return how it breaks the law on any rank."""
    return next(filter(None, everyone(violation(program, DdpRank(program, dist.get_rank()).run()))), "")
