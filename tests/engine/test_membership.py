"""Ranks that are lost, leave or join."""

from __future__ import annotations

import pytest
import torch
from engine.ranks import Job, assert_ranks_equal, everyone, leaves_of, rank, restart, size, transport
from torch import Tensor

from hvd_compress.errors import DisagreementError, UnsupportedError
from hvd_compress.transport.rank_threads import RankGoneError

pytestmark = pytest.mark.usefixtures("on_ranks")

TOPK = "topk:ratio=0.05,min_size=0,vectors=on"


@pytest.mark.parametrize("spec", [TOPK, "powersgd:rank=2", "qsgd:twoway=on"])
def test_a_rank_that_is_lost_ends_the_step_of_all(spec: str) -> None:
    """An error, not a hang; what was kept is that from before the step."""
    job = Job(spec).run(2)
    before, weights = leaves_of(job.compression), job.weights
    if rank() == size() - 1:
        return
    with pytest.raises(RankGoneError, match=f"but rank {size() - 1} has ended"):
        job.run(range(2, 3))
    after = leaves_of(job.compression)
    assert all(torch.equal(leaf, after[path]) for path, leaf in before.items())
    assert torch.equal(job.weights, weights)


@pytest.mark.parametrize("spec", [TOPK, "powersgd:rank=2"])
def test_a_rank_that_is_lost_in_a_step_hangs_none(spec: str) -> None:
    """It has given its gradients: the others complete the step, or end with an error that leaves no trace."""
    job = Job(spec).run(2)
    before = leaves_of(job.compression)
    if rank() == size() - 1:
        job.backward(2)
        return
    try:
        job.run(range(2, 3))
    except RankGoneError:
        after = leaves_of(job.compression)
        assert all(torch.equal(leaf, after[path]) for path, leaf in before.items())


def residual(job: Job) -> Tensor:
    """All that a rank keeps, by the order of parameters."""
    pieces = []
    for p in job.model.parameters():
        _, bucket, position = job.reducer.places[id(p)]
        kept = bucket.read().get("residual")
        pieces.append(torch.zeros(p.numel()) if kept is None else torch.tensor(kept[bucket.spans[position]]))
    return torch.cat(pieces)


def step_of(job: Job, step: int) -> tuple[Tensor, Tensor]:
    """Make a step; gives this rank's gradients, and the sum that all ranks got."""
    job.backward(step)
    given = torch.cat([p.grad.flatten().clone() for p in job.model.parameters() if p.grad is not None])
    job.optimizer.synchronize()
    got = torch.cat([p.grad.flatten().clone() for p in job.model.parameters() if p.grad is not None]) * size()
    with job.optimizer.skip_synchronize():
        job.optimizer.step()
    job.optimizer.zero_grad()
    return given, got


@pytest.mark.matched("names")  # only Horovod has elastic jobs
def test_a_rank_leaves_and_joins_an_elastic_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """What survivors keep, they keep; a newcomer begins with nothing; and nothing else is lost."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    everyone("are elastic")
    job, all_ranks = Job(TOPK, momentum=0.0), list(range(size()))
    put_in, got = torch.zeros_like(job.weights).float(), torch.zeros_like(job.weights).float()
    newcomer = rank() == size() - 1
    for epoch, steps in enumerate([range(2), range(2, 4), range(4, 6)]):
        members = all_ranks[:-1] if epoch == 1 else all_ranks
        if transport().thread not in members:
            continue
        if epoch:
            restart(members, epoch)
        if epoch == 2:
            weights = everyone(job.weights)[0]
            torch.nn.utils.vector_to_parameters(weights.float(), job.model.parameters())
            if newcomer:
                job.optimizer.close()
                job = Job(TOPK, job.model)
        for step in steps:
            mine, total = step_of(job, step)
            put_in, got = put_in + mine, got + total
        assert_ranks_equal(job.weights)
        if epoch == 0:
            lost = everyone(residual(job))[-1]
    puts, kept = everyone(put_in), everyone(residual(job))
    outstanding = torch.stack(puts).sum(0) - torch.stack(kept).sum(0) - everyone(got)[0]
    torch.testing.assert_close(outstanding, lost, rtol=0, atol=1e-5)
    assert lost.abs().max() > 1e-3


ALL = "min_size=0,vectors=on"


@pytest.mark.matched("nodes by name")
@pytest.mark.parametrize(
    "spec",
    [TOPK, f"powersgd:rank=2,min_gain=0,{ALL}", f"int8:feedback=on,{ALL}", f"randomk:ratio=0.2,{ALL}"],
)
def test_horovod_is_started_again_on_half_of_the_ranks(spec: str) -> None:
    """Sums are those of the ranks that there are, and each keeps its residual."""
    job = Job(spec).run(2)
    restart([0, 1] if rank() < 2 else [2, 3], 1)
    given, got = residual(job), torch.zeros_like(residual(job))
    for step in range(2, 5):
        mine, total = step_of(job, step)
        given, got = given + mine, got + total
    kept = torch.stack(everyone(given - residual(job))).sum(0)
    torch.testing.assert_close(got, kept, rtol=1e-4, atol=1e-5)
    assert_ranks_equal(job.weights)


@pytest.mark.matched("nodes by name")
@pytest.mark.parametrize("spec", ["loco", "efsignsgd:twoway=on", "topk:ratio=0.1,delay=2"])
def test_a_state_that_is_divided_among_the_ranks_does_not_follow_to_others(spec: str) -> None:
    job = Job(spec).run(2)
    restart([0, 1] if rank() < 2 else [2, 3], 1)
    for _ in range(2):  # it stays so
        with pytest.raises(UnsupportedError, match=r"is rank . of 2 now, but .* compression.save\(folder\)"):
            job.backward(2)


@pytest.mark.matched("nodes by name")
def test_ranks_of_two_jobs_that_become_one_are_told_that_they_differ() -> None:
    first = rank() < 2
    restart([0, 1] if first else [2, 3], 1)
    job = Job("int8").run(2)
    restart([0, 1, 2, 3], 2)
    with pytest.raises(DisagreementError, match="restored state"):
        job.run(range(2, 3))
