"""Programs on ranks as threads, with the engine of PyTorch."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from engine.ranks import Compressor, Optimizer, enter
from laws.law import violation
from laws.program import ALL, Able, Program, Step, conserving
from laws.torch_rank import OptimizerRank, method_of
from torch import nn

from hvd_compress.ops.torch_devices import torch_ops
from hvd_compress.torch import step as engine_step
from hvd_compress.transport.rank_threads import RankThreads, ThreadTransport

ABLE = Able(
    list(conserving()),
    settings=((2, 1, "names"), (3, 1, "channels"), (2, 1, "turns"), (4, 2, "channels")),
    fates=("applied", "not finite", "given up", "discarded"),
    before=("renewed", "resumed"),
    events=ALL,
    idle=True,
    chooses=True,
)


class ThreadRank(OptimizerRank):
    """A rank that is a thread."""

    def compressor(self) -> Compressor:
        return Compressor(method_of(self.program), self.program.merge)

    def renewed(self) -> None:
        for optimizer in getattr(self, "optimizers", {}).values():
            optimizer.close()
        super().renewed()

    def optimizer(self, model: int, parameters: dict[str, nn.Parameter]) -> Optimizer:
        return Optimizer(nn.ParameterDict(parameters), self.compression)

    def owner(self, optimizer: Any) -> Any:
        return optimizer.local

    def during(self, step: Step, part: int) -> AbstractContextManager[object]:
        for optimizer in self.optimizers.values():
            optimizer._passes = step.passes
        return super().during(step, part)


def start() -> bool:
    """Prepare; return whether this process speaks for all ranks."""
    torch.set_num_threads(1)
    engine_step._PATIENCE = 0.1
    return True


def run(program: Program) -> str:
    """Run a program; return how it breaks the law."""

    def rank(transport: ThreadTransport) -> Any:
        enter(transport)
        return ThreadRank(program, transport.world.rank).run()

    ranks = RankThreads(program.ranks, torch_ops("cpu"), program.local_size, program.seed, program.matching, 60.0)
    return violation(program, *ranks.run(rank))
