"""A rank of `test_gossip.py`, started by torchrun with 8 ranks: gossip beside its algorithms as published.

The published ones run on all ranks' models in one process, from the same initial models and factors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvd_compress.distributed import Gossip

SHAPES = [(20, 12), (5,), (8, 9)]
MATRICES = [0, 2]
LR = 0.3

Models: TypeAlias = list[list[Tensor]]
"""The parameters of each rank."""

Weights: TypeAlias = dict[tuple[int, int], float]
"""Weight of each edge, by its ranks in ascending order."""

dist.init_process_group("gloo")
HALVES = [dist.new_group(ranks) for ranks in ([0, 1, 2, 3], [4, 5, 6, 7])]
GROUPS = {4: HALVES[dist.get_rank() // 4], 8: dist.group.WORLD}
"""The group of this rank by its size: four ranks gossip beside four others."""


class Ranks:
    """Training of this rank and the models of all.

    Each makes local steps of its own: the gradient of a rank is a random one that all ranks know.
    """

    def __init__(self, size: int, graph: Any, **options: Any) -> None:
        generator = torch.Generator().manual_seed(5)
        self.parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        self.optimizer = torch.optim.SGD(self.parameters, lr=LR)
        self.size, self.step = size, 0
        self.gossip = Gossip(self.optimizer, graph, group=GROUPS[size], **options)

    def gradients(self, step: int, rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(100 * step + rank)
        return [torch.randn(shape, generator=generator) * (step < 4) for shape in SHAPES]

    def train(self) -> None:
        for parameter, gradient in zip(
            self.parameters, self.gradients(self.step, dist.get_rank() % self.size), strict=True
        ):
            parameter.grad = gradient
        self.optimizer.step()
        self.step += 1

    def models(self) -> Models:
        return self.told([parameter.detach().clone() for parameter in self.parameters])

    def told(self, mine: Any) -> list[Any]:
        """Return what all ranks tell."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, GROUPS[self.size])
        return found


def ring(size: int) -> Weights:
    return {(min(i, j), max(i, j)): 1 / 3 for i in range(size) for j in [(i + 1) % size]}


def torus(size: int) -> Weights:
    """Rows of two ranks: neighbours in a row are so on both sides."""
    weights: Weights = {}
    for rank in range(size):
        for other in (rank ^ 1, (rank + 2) % size):
            pair = (min(rank, other), max(rank, other))
            weights[pair] = weights.get(pair, 0) + 1 / 5
    return weights


GRAPHS: dict[str, Callable[[int], Weights]] = {"ring": ring, "torus": torus}


def gram_schmidt(matrix: Tensor) -> Tensor:
    columns: list[Tensor] = []
    for column in matrix.T.clone():
        for done in columns:
            column = column - (done @ column) * done
        columns.append(column / (column.norm() + 1e-8))
    return torch.stack(columns, 1)


class PowerGossip:
    """Algorithm 1 of the paper, in the form of its authors' code: one vector for each edge and matrix, in turns.

    Args:
        weights: The graph.
        factors: Q of each edge and matrix.
    """

    def __init__(self, weights: Weights, factors: dict[tuple[int, int], list[Tensor]]) -> None:
        self.weights, self.right = weights, factors
        self.left: dict[tuple[int, int], list[Tensor]] = {}
        self.iteration = 1

    def mix(self, models: Models) -> Models:
        after = deepcopy(models)
        for (low, high), weight in self.weights.items():
            matrices = [models[high][i] - models[low][i] for i in MATRICES]
            if self.iteration % 2 == 1:
                self.right[low, high] = [gram_schmidt(q) for q in self.right[low, high]]
                self.left[low, high] = [m @ q for m, q in zip(matrices, self.right[low, high], strict=True)]
            else:
                self.left[low, high] = [gram_schmidt(p) for p in self.left[low, high]]
                self.right[low, high] = [m.T @ p for m, p in zip(matrices, self.left[low, high], strict=True)]
            known = {i: p @ q.T for i, p, q in zip(MATRICES, self.left[low, high], self.right[low, high], strict=True)}
            for i in range(len(SHAPES)):
                difference = known[i] if i in known else models[high][i] - models[low][i]
                after[high][i] -= weight * difference
                after[low][i] += weight * difference
        self.iteration += 1
        return after


def factors_of(job: Ranks) -> dict[tuple[int, int], list[Tensor]]:
    """Return the factors with which each edge has begun, after a first exchange, which makes P of Q."""
    mine, rank = {}, job.gossip.settings.rank
    for session in job.gossip.state_dict()["sessions"].values():
        found = {(one["p"].numel(), one["q"].numel()): one["q"] for one in session["buckets"].values() if "q" in one}
        if found:
            factors = [found[n * rank, m * rank].reshape(m, rank) for n, m in (SHAPES[i] for i in MATRICES)]
            mine[tuple(one % job.size for one in session["process_set"])] = factors
    return {edge: factors for one in job.told(mine) for edge, factors in one.items()}


def close(found: Models, expected: Models, message: str) -> None:
    for one, other in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=lambda text: f"{message}: {text}")


def mean(models: Models) -> Tensor:
    return torch.stack([torch.cat([one.flatten().double() for one in model]) for model in models]).mean(0)


def stepped(job: Ranks, models: Models, step: int) -> Models:
    """Make the local steps of all ranks."""
    return [
        [one - LR * gradient for one, gradient in zip(model, job.gradients(step, rank), strict=True)]
        for rank, model in enumerate(models)
    ]


def follow(job: Ranks, begun: Callable[[], Callable[[Models], Models]], message: str) -> None:
    """Train, and compare with a published algorithm, which is made after the first exchange."""
    job.train()
    mix: Callable[[Models], Models] | None = None
    for step in range(1, 7):
        before = job.models()
        job.train()
        mix = mix or begun()
        close(job.models(), stepped(job, mix(before), step), f"{message}, step {step}")
        torch.testing.assert_close(mean(job.models()), mean(stepped(job, before, step)), rtol=0, atol=1e-6)


def check_power_gossip(size: int) -> None:
    for graph, rank in itertools.product(GRAPHS, (1, 4)):
        job = Ranks(size, graph, rank=rank)
        assert {edge[:2]: edge.weight for edge in job.gossip.edges} == GRAPHS[graph](size)
        begun = partial(lambda job, graph: PowerGossip(GRAPHS[graph](size), factors_of(job)).mix, job, graph)
        follow(job, begun, f"{graph}, {size} ranks, rank {rank}")


def check_plain_gossip(size: int) -> None:
    for graph in GRAPHS:
        weights = GRAPHS[graph](size)
        matrix = torch.eye(size)
        for (low, high), weight in weights.items():
            matrix[low, high] = matrix[high, low] = weight
            matrix[low, low] -= weight
            matrix[high, high] -= weight

        def mix(models: Models, matrix: Tensor = matrix) -> Models:
            stacks = [torch.stack([model[i] for model in models]) for i in range(len(SHAPES))]
            return [[torch.tensordot(row, stack, 1) for stack in stacks] for row in matrix]

        follow(Ranks(size, graph, compression="none"), partial(lambda mix: mix, mix), f"plain, {graph}, {size} ranks")


def check_choco(size: int) -> None:
    """Koloskova, Stich, Jaggi, 2019, algorithm 2, with top-k of the matrices: all neighbours know x_hat of a rank."""
    ratio, step_size = 0.25, 0.4
    for graph in GRAPHS:
        weights = GRAPHS[graph](size)
        hats = [[torch.zeros(shape) for shape in SHAPES] for _ in range(size)]

        def mix(models: Models, weights: Weights = weights, hats: Models = hats) -> Models:
            for model, hat in zip(models, hats, strict=True):
                for i, (x, h) in enumerate(zip(model, hat, strict=True)):
                    change = (x - h).flatten()
                    count = round(ratio * change.numel()) if i in MATRICES else change.numel()
                    kept = change.abs().topk(count).indices
                    h.view(-1)[kept] += change[kept]
            after = deepcopy(models)
            for (low, high), weight in weights.items():
                for i in range(len(SHAPES)):
                    difference = step_size * weight * (hats[high][i] - hats[low][i])
                    after[high][i] -= difference
                    after[low][i] += difference
            return after

        spec = f"topk:ratio={ratio},min_size=0,feedback=ef21"
        job = Ranks(size, graph, compression=spec, step_size=step_size)
        follow(job, partial(lambda mix: mix, mix), f"CHOCO, {graph}, {size} ranks")


def check_a_full_rank_removes_the_weight_of_a_difference() -> None:
    """The first matrix has 12 columns, and the first exchange a Q of as many."""
    job = Ranks(8, "ring", rank=12)
    plain = Ranks(8, "ring", compression="none")
    for _ in range(2):
        job.train()
        plain.train()
    close([model[:1] for model in job.models()], [model[:1] for model in plain.models()], "full rank")


def check_several_iterations() -> None:
    """Two in a step are as one in each of two steps without gradients between."""
    one, two = Ranks(8, "torus", rank=2), Ranks(8, "torus", rank=2, iterations=2)
    for job in (one, two):
        job.gradients = lambda step, rank: [torch.zeros(shape) for shape in SHAPES]  # type: ignore[method-assign]
        job.train()
        with torch.no_grad():
            for parameter in job.parameters:
                parameter.add_(dist.get_rank())
    for _ in range(3):
        one.train()
        one.train()
        two.train()
        close(one.models(), two.models(), "iterations")


def check_any_graph_keeps_the_mean() -> None:
    rng = np.random.default_rng(3)
    for _ in range(2):
        tree = [(int(rng.integers(rank)), rank) for rank in range(1, 8)]
        more = [pair for pair in itertools.combinations(range(8), 2) if pair not in tree and rng.random() < 0.2]
        job = Ranks(8, [*tree, *more], rank=2)
        for _ in range(6):
            before = job.models()
            job.train()
            expected = mean(stepped(job, before, job.step - 1))
            torch.testing.assert_close(mean(job.models()), expected, rtol=0, atol=1e-6)


def distance(models: Models) -> float:
    flat: Sequence[Tensor] = [torch.cat([one.flatten() for one in model]) for model in models]
    return float(torch.stack(list(flat)).std(0, correction=0).norm())


def check_models_agree_in_the_end() -> None:
    job = Ranks(8, "exponential", rank=2)
    for _ in range(4):
        job.train()
    first = distance(job.models())
    for _ in range(60):
        job.train()
    assert distance(job.models()) < 0.01 * first


for size in (4, 8):
    check_plain_gossip(size)
    check_choco(size)
    check_power_gossip(size)
check_a_full_rank_removes_the_weight_of_a_difference()
check_several_iterations()
check_any_graph_keeps_the_mean()
check_models_agree_in_the_end()
dist.destroy_process_group()
