"""Parameters that some ranks, or all, have not used in a step: what is given is delivered or kept."""

from __future__ import annotations

import random

import pytest
import torch
from engine.ranks import Compression, Job, assert_ranks_equal, everyone, rank, size
from torch import Tensor, nn

from hvd_compress.core.state_tree import Per, Role, flatten, kinds

pytestmark = pytest.mark.usefixtures("on_ranks")

SHAPES = [(24, 30), (16,), (20, 12), (18, 18)]
FULL = "min_size=0,vectors=on"
LAWFUL = [
    f"topk:ratio=0.05,{FULL}",
    f"efsignsgd:block=64,twoway=on,{FULL}",
    f"powersgd:rank=1,min_gain=0,{FULL}",
    f"thc:{FULL},feedback=on",
    f"randomk:ratio=0.05,feedback=on,{FULL}",
]
OTHERS = [
    f"{spec},{FULL}"
    for spec in ("dgc:ratio=0.05", "topk:ratio=0.05,feedback=ef21", "loco:block=64", "scalecom:ratio=0.05")
]


class Parameters(nn.Module):
    """Parameters whose gradients are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)


class Program:
    """Steps of a job in which ranks use some of the parameters."""

    def __init__(self, spec: str) -> None:
        self.job = Job(Compression.parse(spec, merge=2), Parameters(), mean=False)
        self.parameters = list(self.job.model.parameters())
        optimizer = self.job.optimizer
        self.reducer = optimizer._compression.begin(optimizer, optimizer._named, mean=False)
        self.given = [torch.zeros(shape) for shape in SHAPES]
        self.delivered = [torch.zeros(shape) for shape in SHAPES]

    def step(self, number: int, used: list[list[bool]]) -> None:
        """Make a step, given which parameters each rank uses."""
        everywhere = [any(column) for column in zip(*used, strict=True)]
        tickets, grads = [], []
        for i, shape in reversed(list(enumerate(SHAPES))):
            drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * number + 10 * i + rank()))
            grad = drawn if used[rank()][i] else torch.zeros(shape)
            self.given[i] += grad
            grads.append((i, grad, grad.clone()))
            tickets.append(self.reducer.add(id(self.parameters[i]), grad, None, None, used[rank()][i]))
        with self.job.compression._lock:
            for placeholder, ticket in tickets:
                self.reducer.take(placeholder, ticket)
        for i, grad, before in grads:
            if everywhere[i]:
                self.delivered[i] += grad
            else:
                assert torch.equal(grad, before)

    def kept(self) -> list[Tensor]:
        """What this rank keeps of each parameter: its residual, and what it owes as a server."""
        found = []
        for parameter in self.parameters:
            _, bucket, position = self.reducer.places[id(parameter)]
            span, total = bucket.spans[position], torch.zeros(parameter.numel())
            known = kinds(bucket.state)
            for path, leaf in flatten(bucket.state).items():
                if known[path].residual:
                    total += leaf[span]
                elif known[path].role is Role.SERVED:
                    whole = torch.zeros(size() * len(leaf))
                    whole[rank() * len(leaf) : (rank() + 1) * len(leaf)] = leaf
                    total += whole[span]
            found.append(total.view(parameter.shape))
        return found

    def leaves_of(self, number: int) -> dict[str, Tensor]:
        """The state of a parameter by coordinates."""
        _, bucket, position = self.reducer.places[id(self.parameters[number])]
        span, known = bucket.spans[position], kinds(bucket.state)
        leaves = flatten(bucket.state).items()
        return {path: leaf[span].clone() for path, leaf in leaves if known[path].per is Per.COORDINATE}


def drawn(number: int) -> list[list[bool]]:
    """Which parameters each rank uses."""
    dice = random.Random(number)
    return [[dice.random() < 0.4 for _ in SHAPES] for _ in range(size())]


@pytest.mark.parametrize("spec", LAWFUL)
def test_what_was_given_is_delivered_or_kept(spec: str) -> None:
    program = Program(spec)
    for number in range(8):
        program.step(number, drawn(number))
    ranks = everyone((program.given, program.kept()))
    for i, delivered in enumerate(program.delivered):
        given, kept = (torch.stack([one[part][i] for one in ranks]).sum(0) for part in range(2))
        torch.testing.assert_close(delivered + kept, given, rtol=1e-4, atol=2e-4)
        assert_ranks_equal(delivered)


@pytest.mark.parametrize("spec", [*LAWFUL, *OTHERS])
def test_what_no_rank_has_used_keeps_its_state(spec: str) -> None:
    """One that shares its bucket, and all at once."""
    program = Program(spec)
    all_used = [[True] * len(SHAPES)] * size()
    for number in range(3):
        program.step(number, all_used)
    for number, unused in enumerate([{1}, {0, 2}, {0, 1, 2, 3}], start=3):
        before = [program.leaves_of(i) for i in range(len(SHAPES))]
        program.step(number, [[i not in unused for i in range(len(SHAPES))]] * size())
        for i in unused:
            after = program.leaves_of(i)
            assert all(torch.equal(after[path], leaf) for path, leaf in before[i].items())
    program.step(9, all_used)
