"""With loss: training converges, and ranks never drift apart."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from parallel.pytorch.training import Job, assert_ranks_equal, batch, everyone
from torch import Tensor, nn

import hvd_compress.torch.step
from hvd_compress.torch import Compression

LOSSY = ["topk:ratio=0.01", "powersgd:rank=2", "onebit:twoway=on"]


class Branches(nn.Module):
    """Three branches that can be used in any order or not at all."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.branches = nn.ModuleList(nn.Linear(32, 64) for _ in range(3))
            self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        hidden = sum((self.branches[i](x).relu() for i in order), torch.zeros(1))
        logits: Tensor = self.head(hidden)
        return logits


@pytest.mark.parametrize(("spec", "merge", "steps"), [*((spec, 2, 20) for spec in LOSSY), (LOSSY[0], "layer", 20)])
def test_ranks_stay_equal_whatever_the_order(spec: str, merge: int | str, steps: int) -> None:
    """Each rank computes its gradients in another order, and one leaves a branch out now and then."""
    order = [[0, 1, 2], [2, 1, 0], [1, 2, 0]][hvd.rank() % 3]
    used: list[set[Tensor]] = []
    job = Job(Compression.parse(spec, merge=merge), Branches(), lr=0.02)
    for step in range(steps):
        left_out = hvd.rank() == 1 and step % 5 == 2
        job.backward(
            step,
            lambda m, x, y, left_out=left_out: nn.functional.cross_entropy(m(x, order[:2] if left_out else order), y),
        )
        used.append({p for p in job.model.parameters() if p.grad is not None})
        job.optimizer.step()
        job.optimizer.zero_grad()
    assert_ranks_equal(job.weights)
    x, y = batch(9999)
    loss = sum(everyone(nn.functional.cross_entropy(job.model(x, [0, 1, 2]), y).item())) / hvd.size()
    assert loss < 2.25  # it was ln 10 = 2.3 at the start
    assert len({len(parameters) for parameters in used}) == (2 if hvd.rank() == 1 else 1)


def test_a_rank_that_asks_for_something_else_first_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has no gradient of a branch yet and wants the sum of a metric before it goes on; the others have them all."""
    monkeypatch.setattr(hvd_compress.torch.step, "_PATIENCE", 0.1)
    job = Job("topk:ratio=0.1", Branches())
    order = [0, 1] if hvd.rank() == 1 else [0, 1, 2]
    for step in range(3):
        job.backward(step, lambda m, x, y: nn.functional.cross_entropy(m(x, order), y))
        hvd.allreduce(torch.zeros(1), name="metric")
        job.optimizer.step()
        job.optimizer.zero_grad()
    assert_ranks_equal(job.weights)


def test_clipping_between_synchronize_and_step() -> None:
    jobs = [Job(hvd.Compression.none), Job("topk:ratio=1.0")]
    for job in jobs:
        for step in range(5):
            job.backward(step)
            job.optimizer.synchronize()
            nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)
            with job.optimizer.skip_synchronize():
                job.optimizer.step()
            job.optimizer.zero_grad()
    torch.testing.assert_close(jobs[0].weights, jobs[1].weights, rtol=0, atol=1e-6)


def test_random_generators_are_left_alone() -> None:
    job = Job("powersgd:rank=2").run(1)
    state = torch.random.get_rng_state()
    job.run(3)
    Job("randomk").run(3)
    Job("int8").run(3)
    assert torch.equal(torch.random.get_rng_state(), state)
