"""Nodes of two ranks: every way to communicate between them, and within them."""

from __future__ import annotations

import pytest
import torch
from catalogue import BETWEEN_NODES, one_in
from engine.ranks import Job, assert_ranks_equal, everyone, leaves_of, rank, size
from torch import nn

pytestmark = [pytest.mark.usefixtures("on_ranks"), pytest.mark.matched("nodes")]


@pytest.mark.parametrize("spec", one_in(6, BETWEEN_NODES))
def test_ranks_stay_equal_and_a_restored_job_goes_on(spec: str) -> None:
    whole = Job(spec).run(3)
    assert_ranks_equal(whole.weights)
    second = Job(spec, whole.model)
    whole.optimizer.close()
    second.compression.load_state_dict(whole.compression.state_dict())
    second.run(range(3, 5))
    straight = Job(spec).run(5)
    assert torch.equal(second.weights, straight.weights)
    for path, leaf in leaves_of(straight.compression).items():
        assert torch.equal(leaf, leaves_of(second.compression)[path]), path


@pytest.mark.matched("nodes", "nodes by name", "nodes in turns")
def test_groups_of_ranks_may_take_different_branches() -> None:
    """Half of each bucket is dense, which sends `homomorphic` there into a branch with fewer collectives."""
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False))
    job = Job("homomorphic:hierarchical=on", model, mean=False)
    rng = torch.Generator().manual_seed(rank())
    for step in range(3):
        given = [torch.zeros(100, 100), torch.zeros(100, 100)]
        for number, gradient in enumerate(given):
            dense = (number + step) % 2 * 50
            gradient[dense : dense + 50] = torch.randn(50, 100, generator=rng)
            gradient[99 - dense, :50] = 1.0
        job.backward(
            0, lambda model, x, y, g=given: sum((p * g).sum() for p, g in zip(model.parameters(), g, strict=True))
        )
        job.optimizer.synchronize()
        for parameter, gradients in zip(model.parameters(), zip(*everyone(given), strict=True), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, sum(gradients))
        job.optimizer.zero_grad()


def test_lossless_is_as_without_nodes() -> None:
    plain, tall = (Job(f"topk:ratio=1.0,min_size=0{more}").run(3) for more in ("", ",hierarchical=on"))
    torch.testing.assert_close(tall.weights, plain.weights, rtol=0, atol=1e-6)
    assert tall.compression.stats().bytes_inside > plain.compression.stats().bytes_inside == 0


@pytest.mark.parametrize(
    "spec", ["fp16:feedback=on", "topk:ratio=0.25,hierarchical=on,inside=fp16", "signum:hierarchical=on,inside=fp16"]
)
def test_values_beyond_float16_are_clipped_and_the_residual_keeps_the_rest(spec: str) -> None:
    """All numbers are powers of two, so that float16 holds them and their sums."""
    job = Job(spec, nn.Linear(40, 40, bias=False), mean=False)
    given, delivered = 0.0, torch.zeros(40, 40)
    for slope in (2.0**10, 2.0**17, 2.0**10, 2.0**10):
        mine = slope if rank() == size() - 1 else 0.0
        job.backward(0, lambda model, x, y, mine=mine: (model.weight * mine).sum())
        job.optimizer.synchronize()
        (weight,) = job.model.parameters()
        assert weight.grad is not None
        given, delivered = given + slope, delivered + weight.grad
        job.optimizer.zero_grad()
    assert delivered.isfinite().all()
    kept = [leaf for path, leaf in leaves_of(job.compression).items() if path.endswith("residual")]
    if kept:
        torch.testing.assert_close(delivered + sum(everyone(kept[0])).view(40, 40), torch.full((40, 40), given))
    assert all(leaf.isfinite().all() for leaf in leaves_of(job.compression).values())
