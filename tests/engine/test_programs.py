"""Programs drawn at random: what is not applied leaves no trace, whatever came before and after it."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable

import pytest
import torch
from catalogue import one_in
from engine.ranks import Compression, Job, assert_ranks_equal, leaves_of, rank, size
from torch import Tensor, nn

pytestmark = [pytest.mark.usefixtures("on_ranks"), pytest.mark.matched("names", "channels", "turns")]

SPECS = [
    "topk:ratio=0.05",
    "powersgd:rank=2",
    "qsgd:twoway=on",
    "dgc:ratio=0.05",
    "randomk:ratio=0.1,min_size=0",
    "acpsgd:rank=2",
    "topk:ratio=0.05,every=3",
    "loco",
]

LENGTH = 12


class Program:
    """A job that does more than to make steps.

    Args:
        spec: Of the compression.
        chance: Draws the same on all ranks.
    """

    def __init__(self, spec: str, chance: random.Random) -> None:
        self.chance = chance
        self.scale = 1.0
        self.job = Job(spec)
        self._follow()
        self.steps = 0

    def _follow(self) -> None:
        self.job.compression.follow(lambda: self.scale)

    def _reduce(self, step: int, factor: float = 1.0) -> None:
        self.job.optimizer.zero_grad()
        self.job.backward(step, lambda m, x, y: nn.functional.cross_entropy(m(x), y) * factor * self.scale)
        self.job.optimizer.synchronize()

    def step(self) -> None:
        """A step as any other."""
        self._reduce(self.steps)
        for p in self.job.model.parameters():
            assert p.grad is not None
            p.grad /= self.scale
        with self.job.optimizer.skip_synchronize():
            self.job.optimizer.step()
        self.steps += 1

    def overflow(self) -> None:
        """One rank has a gradient that is not finite."""
        bad = self.chance.randrange(size())
        self._reduce(100 + self.steps, math.nan if rank() == bad else 1.0)

    def discard(self) -> None:
        """A step is reduced and thrown away."""
        self._reduce(200 + self.steps)
        self.job.compression.discard()

    def give_up(self) -> None:
        """A step is begun and left, in the middle of its backward pass or after it."""

        def fail(grad: Tensor) -> Tensor:
            raise ArithmeticError

        self.job.optimizer.zero_grad()
        name = self.chance.choice(["0.weight", "2.bias", ""])
        hook = self.job.model.get_parameter(name).register_hook(fail) if name else None  # type: ignore[no-untyped-call]
        with contextlib.suppress(ArithmeticError):
            self.job.backward(300 + self.steps)
        if hook is not None:
            hook.remove()
        self.job.optimizer.load_state_dict(self.job.optimizer.state_dict())

    def resume(self) -> None:
        """A new job goes on from the state of the old one."""
        old, state = self.job, copy.deepcopy(self.job.compression.state_dict())
        self.job = Job(Compression.parse(old.compression.method, merge=2), copy.deepcopy(old.model))
        self.job.compression.load_state_dict(state)
        self._follow()

    def renew(self) -> None:
        """A new optimizer takes the place of the old one."""
        old = self.job
        old.optimizer.close()
        del old.optimizer
        self.job = Job(old.compression, old.model)

    def rescale(self) -> None:
        """The loss scale changes."""
        self.scale = 2.0 ** self.chance.randrange(-3, 12)


DO: list[Callable[[Program], None]] = [
    Program.step,
    Program.step,
    Program.overflow,
    Program.discard,
    Program.give_up,
    Program.resume,
    Program.renew,
    Program.rescale,
]


@pytest.mark.parametrize("seed", one_in(4, range(len(SPECS))))
def test_what_is_not_applied_leaves_no_trace(seed: int) -> None:
    chance = random.Random(seed)
    program = Program(SPECS[seed], chance)
    done: list[str] = []
    for _ in range(LENGTH):
        do = chance.choice(DO)
        done.append(do.__name__)
        do(program)
    program.step()
    twin = Job(SPECS[seed]).run(program.steps)
    assert torch.equal(program.job.weights, twin.weights), done
    assert_ranks_equal(program.job.weights)
    for path, leaf in leaves_of(twin.compression).items():
        assert torch.equal(leaf, leaves_of(program.job.compression)[path]), (path, done)
