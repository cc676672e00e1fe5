"""A rank of `test_quorum.py`: jobs drawn at random, whose ranks are late at random, beside a job of one process.

Who has averaged with whom is read from the store; from that the other job makes all models.
"""

from __future__ import annotations

import os
import random
import sys
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvd_compress.distributed import LocalSteps, Outer
from hvd_compress.errors import StateError
from hvd_compress.local.rounds import Rounds
from hvd_compress.local.settings import LocalSettings
from hvd_compress.local.stepper import Meeting

SHAPES = [(6, 5), (5,), (7, 2)]
LR = 0.3

folder, what = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", timeout=timedelta(seconds=15 if what in ("gone", "alone") else 60))
rank, size = dist.get_rank(), dist.get_world_size()


def draw(generator: random.Random) -> dict[str, Any]:
    fragments = generator.choice([1, 1, 2, 3])
    every = fragments * generator.randint(1, 4)
    return {
        "every": every,
        "fragments": fragments,
        "delay": generator.randint(0, every // fragments - 1),
        "mix": generator.choice([0.0, 0.5]),
        "outer": generator.choice([Outer(), Outer(lr=0.7, momentum=0.9, nesterov=True)]),
        "quorum": generator.randint(1, size),
        "patience": generator.choice([0.0, 0.05]),
        "compression": generator.choice(
            [
                "none",
                "none",
                "topk:ratio=0.3,min_size=0",
                "powersgd:rank=2,min_size=0,min_gain=0,vectors=on",
                "qsgd:bits=4,min_size=0",
            ]
        ),
    }


def begun() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def gradients(parameters: list[Any], step: int, of_rank: int) -> list[Tensor]:
    """Those of a quadratic function with some noise."""
    generator = torch.Generator().manual_seed(1000 * step + of_rank)
    return [p.detach() + torch.randn(p.shape, generator=generator) for p in parameters]


class Job:
    """A training of this rank."""

    def __init__(self, seed: int, options: dict[str, Any]) -> None:
        self.parameters = [nn.Parameter(one) for one in begun()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=LR)
        self.local = LocalSteps(self.optimizer, **options)
        self.generator = random.Random(100 * seed + rank)
        self.missed = 0

    def linger(self) -> None:
        """Come too late, if the others do without this rank, to a meeting that may be the next one."""
        meetings: Any = self.local._meetings
        if self.generator.random() < 0.3:
            number = meetings._number + self.generator.choice([0, 0, 1])
            try:
                meetings._store.wait([f"{number}.ranks"], timedelta(seconds=0.1))
            except RuntimeError:
                return

    def train(self, lingers: bool = True) -> None:
        before = self.local.steps
        if lingers:
            self.linger()
        for parameter, gradient in zip(self.parameters, gradients(self.parameters, before, rank), strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.missed += self.local.steps > before + 1

    def meetings(self) -> list[Meeting]:
        """Return all meetings of the job."""
        meetings: Any = self.local._meetings
        found: list[Meeting] = []
        for number in count():
            if not meetings._store.check([f"{number}.ranks"]):
                return found
            members, newcomers = meetings._store.get(f"{number}.ranks").decode().split(";")
            found.append(Meeting(*([int(one) for one in part.split(",") if one] for part in (members, newcomers))))
        return found


def alone(options: dict[str, Any], steps: int, meetings: list[Meeting]) -> list[Tensor]:
    """Return the global model of a job whose ranks met so."""
    rounds = Rounds(LocalSettings(**options), begun())
    models = {one: begun() for one in range(size)}  # of the ranks that are not late
    settings, coming = rounds.settings, iter(meetings)
    meeting, means = Meeting(()), list[Tensor]()

    def begins(fragment: int) -> None:
        nonlocal meeting, means, models
        meeting = next(coming)
        models = {one: models[one] for one in meeting.members}
        differences = [rounds.differences(fragment, model) for model in models.values()]
        means = [torch.stack(parts).mean(0) for parts in zip(*differences, strict=True)]

    def ends(fragment: int, mix: float) -> None:
        anchors, momenta = [one.clone() for one in rounds.anchors], [one.clone() for one in rounds._momenta]
        for model in models.values():
            rounds.anchors, rounds._momenta = [one.clone() for one in anchors], [one.clone() for one in momenta]
            after = rounds.apply(fragment, means, model, mix)
            for number, array in zip(rounds.members(fragment), after, strict=True):
                model[number] = array.clone()
        models.update({one: [anchor.clone() for anchor in rounds.anchors] for one in meeting.newcomers})

    for step in range(1, steps + 1):
        for one, model in models.items():
            models[one] = [p - LR * g for p, g in zip(model, gradients(model, step - 1, one), strict=True)]
        if (fragment := settings.begins(step)) is not None:
            begins(fragment)
        if (fragment := settings.ends(step)) is not None:
            ends(fragment, settings.mix)
    if (fragment := settings.flies(steps)) is not None:
        ends(fragment, 0.0)
    done = None if settings.delay else settings.ends(steps)
    for fragment in range(settings.fragments):
        if fragment != done:
            begins(fragment)
            ends(fragment, 0.0)
    assert set(next(coming).everyone) == set(range(size)) and next(coming, None) is None
    return rounds.anchors


def check(seed: int) -> int:
    generator = random.Random(seed)
    options, steps = draw(generator), generator.randint(1, 16)
    counts = generator.random() < 0.5  # the steps of all; otherwise those of its own, so that late ranks end later
    job = Job(seed, options)
    made = 0
    while job.local.steps < steps if counts else made < steps:
        job.train()
        made += 1
    job.local.finish()
    models: list[Any] = [None] * size
    dist.all_gather_object(models, [torch.tensor(job.local.steps), *(p.detach() for p in job.parameters)])
    assert all(torch.equal(a, b) for one in models for a, b in zip(one, models[0], strict=True)), (seed, options)
    meetings = job.meetings()
    assert job.local.steps == steps if counts else job.local.steps >= steps, (seed, options)
    settings = LocalSettings(**options)
    within = sum(settings.begins(step) is not None for step in range(1, job.local.steps + 1))
    assert all(len(one.everyone) == size or len(one.members) >= options["quorum"] for one in meetings[:within])
    if options["compression"] == "none":
        for found, expected in zip(job.parameters, alone(options, job.local.steps, meetings), strict=True):
            torch.testing.assert_close(found.detach(), expected, rtol=1e-4, atol=1e-5, msg=f"{seed}: {options}")
    job.local.remove()
    return job.missed


def leave_one_behind(quorum: int) -> None:
    """The last rank ends between two averages."""
    job = Job(0, {"every": 2, "quorum": quorum, "patience": 0.5, "compression": "topk:ratio=0.3,min_size=0"})
    try:
        for step in range(9):
            if step == 3 and rank == size - 1:
                os._exit(0)
            job.train(lingers=False)
        job.local.finish()
        tell(torch.cat([p.detach().flatten() for p in job.parameters]).tolist())
    except StateError as error:
        tell(error)
    os._exit(0)


def tell(what: Any) -> None:
    (folder / str(rank)).write_text(str(what))


if what in ("gone", "alone"):
    leave_one_behind(quorum=1 if what == "gone" else size)
tell(sum(check(seed) for seed in range(int(what))))
dist.destroy_process_group()
