"""The settings of a comparison."""

from __future__ import annotations

import shlex
from typing import Any, Literal, NamedTuple

from hvd_compress.core.bucketing import Merge
from hvd_compress.tools.bench.jobs import LaunchSpec
from hvd_compress.tools.compare.job import Job

Framework = Literal["torch", "keras", "ddp"]
"""Framework that trains; ``ddp`` is PyTorch with DistributedDataParallel instead of Horovod."""


class Request(NamedTuple):
    """The settings of a comparison."""

    task: str  # A name, or ``file.py:function``
    framework: Framework
    methods: list[str]  # Specs; `BASELINES` are among them
    where: LaunchSpec  # The hosts and ranks
    seeds: int  # Trainings of each method
    target: float | None  # None for the task's own
    budget: float  # Seconds of each training
    lrs: list[float | None]  # Learning rates to try; ``[None]`` for the task's own
    epochs: int | None  # None for the task's own
    merge: Merge  # The merge policy
    data: str  # See `Setting`
    options: dict[str, str]  # See `Setting`

    @property
    def conditions(self) -> dict[str, Any]:
        """The settings that trainings must have in common to be compared."""
        names = ("task", "framework", "budget", "epochs", "merge", "data", "options")
        return {name: getattr(self, name) for name in names} | {"where": self.where._asdict()}

    def job(self, spec: str, seed: int, lr: float | None) -> Job:
        of_task = self.merge, self.epochs, self.budget, self.data, self.options
        return Job(self.task, spec, seed, lr, *of_task, self.where.device)

    def command(self, output: str) -> str:
        """Return the command that asks for this."""
        where = self.where
        words: list[object] = ["hvd-compress", "compare", "--task", self.task, "--methods", ",".join(self.methods)]
        if where.hosts:
            words += ["--hosts", where.hosts, "--rate", where.rate]
            words += ["--ranks-per-host", where.ranks_per_host] if where.ranks_per_host > 1 else []
        else:
            words += ["--ranks", where.ranks]
            words += [] if where.launcher == "torchrun" else ["--controller", where.launcher]
            words += ["--on", where.on] if where.on else []
            words += [] if where.device == "cpu" else ["--device", where.device]
        words += ["--framework", self.framework, "--seeds", self.seeds, "--budget", f"{self.budget:g}s"]
        words += [] if self.target is None else ["--target", f"{self.target:g}"]
        words += [] if self.lrs == [None] else ["--lr", ",".join(f"{lr:g}" for lr in self.lrs if lr is not None)]
        words += [] if self.epochs is None else ["--epochs", self.epochs]
        words += ["--merge", self.merge, *(["--data", self.data] if self.data else [])]
        for name, value in self.options.items():
            words += ["--set", f"{name}={value}"]
        return shlex.join(map(str, [*words, "--output", output]))
