"""What a comparison is asked for."""

from __future__ import annotations

import shlex
from typing import Any, NamedTuple

from hvd_compress.merging import Merge
from hvd_compress.tools.bench.jobs import Framework, Where
from hvd_compress.tools.compare.job import Job


class Request(NamedTuple):
    """A comparison that is asked for.

    Attributes:
        task: Its name, or ``module:function``.
        framework: What trains.
        methods: Specs; `HOROVODS` are among them.
        where: What the ranks run on.
        seeds: How many trainings of each method.
        target: What is good enough; None for the task's own.
        budget: Seconds of each training.
        lrs: Learning rates to try; ``[None]`` for the task's own.
        epochs: None for the task's own.
        merge: How gradients are merged.
        data: See `hvd_compress.tools.compare.training.Setting`.
        options: See there.
    """

    task: str
    framework: Framework
    methods: list[str]
    where: Where
    seeds: int
    target: float | None
    budget: float
    lrs: list[float | None]
    epochs: int | None
    merge: Merge
    data: str
    options: dict[str, str]

    @property
    def conditions(self) -> dict[str, Any]:
        """What trainings must have in common to be compared."""
        names = ("task", "framework", "budget", "epochs", "merge", "data", "options")
        return {name: getattr(self, name) for name in names} | {"where": self.where._asdict()}

    def job(self, spec: str, seed: int, lr: float | None) -> Job:
        """One training."""
        return Job(self.task, spec, seed, lr, self.merge, self.epochs, self.budget, self.data, self.options)

    def command(self, output: str) -> str:
        """How to ask for this."""
        where = self.where
        words: list[object] = ["hvd-compress", "compare", "--task", self.task, "--methods", ",".join(self.methods)]
        if where.hosts:
            words += ["--hosts", where.hosts, "--rate", where.rate]
        else:
            words += [
                "--ranks",
                where.ranks,
                "--controller",
                where.controller,
                *(["--on", where.on] if where.on else []),
            ]
        words += ["--framework", self.framework, "--seeds", self.seeds, "--budget", f"{self.budget:g}s"]
        words += [] if self.target is None else ["--target", f"{self.target:g}"]
        words += [] if self.lrs == [None] else ["--lr", ",".join(f"{lr:g}" for lr in self.lrs if lr is not None)]
        words += [] if self.epochs is None else ["--epochs", self.epochs]
        words += ["--merge", self.merge, *(["--data", self.data] if self.data else [])]
        for name, value in self.options.items():
            words += ["--set", f"{name}={value}"]
        return shlex.join(map(str, [*words, "--output", output]))
