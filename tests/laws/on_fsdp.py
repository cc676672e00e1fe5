"""Programs on FSDP2: a reduce-scatter over all ranks, or two replicas of two shards; on four nodes, or on two.

FSDP knows the replicas, or they are named. It divides by the number of ranks, or by a factor that is not that number.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from laws.law import violation
from laws.on_ddp import everyone
from laws.program import ALL, FAMILIES, Able, Arr, Program, Step
from laws.torch_rank import TorchRank, method_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hvd_compress.distributed.compression import DistributedCompressor

ENDLESS = ["qsgd:block=64,feedback=on", "int8:block=64,feedback=on", "block8:block=64,twoway=off,feedback=on"]

ABLE = Able(
    FAMILIES,
    endless=ENDLESS,
    settings=((4, 1, "channels"), (4, 2, "channels")),
    fates=("applied", "not finite", "discarded"),
    events=ALL - {"optimizers", "turned", "shuffled", "unused", "frozen", "delay"},
    last_pass=True,
    chooses=True,
)


class FsdpRank(TorchRank):
    """A rank with shards of the models."""

    def compressor(self) -> DistributedCompressor:
        return DistributedCompressor(method_of(self.program), self.program.merge)

    def renewed(self) -> None:
        each = self.program.local_size
        os.environ |= {"LOCAL_RANK": str(dist.get_rank() % each), "LOCAL_WORLD_SIZE": str(each)}
        scattered = self.program.spec.startswith(tuple(ENDLESS)) and self.program.drains
        mesh = init_device_mesh("cpu", (1, 4) if scattered else (2, 2), mesh_dim_names=("replicate", "shard"))
        named = self.program.seed // 2 % 2 > 0
        for net in self.nets:
            parts: list[Any] = [*(net.parts if self.program.seed % 2 else ()), net]
            for part in parts:
                fully_shard(part, mesh=mesh["shard"] if named else mesh)
                if self.divisor is not None:
                    part.set_gradient_divide_factor(self.divisor)
                    part.set_force_sum_reduction_for_comms(True)  # Gloo has no other reductions
            self.compression.register(net, replicas=mesh["replicate"].get_group() if named and not scattered else None)

    @property
    def divisor(self) -> float | None:
        """Factor for ``set_gradient_divide_factor``; None to leave FSDP's default, the number of ranks."""
        return 1.5 if self.program.seed % 8 < 2 else None

    def during(self, step: Step, part: int) -> AbstractContextManager[object]:
        for use in step.uses:
            net: Any = self.nets[use.model]
            net.set_requires_gradient_sync(part == step.passes - 1)
        return super().during(step, part)

    def finish(self, step: Step) -> None:
        for use in step.uses:
            if use.fate == "discarded":
                self.compression.discard(self.nets[use.model])

    def read(self, parameter: Tensor) -> Arr:
        grad: Any = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        total: Arr = (grad.full_tensor().double() * ((self.divisor or self.program.ranks) / self.scale)).numpy()
        return total


def start() -> bool:
    """Join the job; return whether this process speaks for all ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist.get_rank() == 0


def run(program: Program) -> str:
    """Run a program; return how it breaks the law on any rank."""
    return next(filter(None, everyone(violation(program, FsdpRank(program, dist.get_rank()).run()))), "")
