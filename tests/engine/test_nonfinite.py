"""Gradients and sums that are not finite are seen by all ranks, and leave no trace; loss scales leave none, either."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from catalogue import EACH_KIND, WARMING_UP, one_in
from engine.ranks import Job, assert_ranks_equal, everyone, leaves_of, rank, size
from torch import Tensor, nn

from hvd_compress.errors import SpecError

pytestmark = [pytest.mark.usefixtures("on_ranks"), pytest.mark.matched("names", "channels", "turns")]


def last() -> bool:
    """Whether this is the last rank."""
    return rank() == size() - 1


def reduce(job: Job, step: int, factor: float = 1.0, scale: float = 1.0) -> None:
    """Compute and reduce gradients."""
    job.optimizer.zero_grad()
    job.backward(step, lambda m, x, y: nn.functional.cross_entropy(m(x), y) * factor * scale)
    job.optimizer.synchronize()


def apply(job: Job, scale: float = 1.0) -> None:
    """Step with reduced gradients."""
    for p in job.model.parameters():
        assert p.grad is not None
        p.grad /= scale
    with job.optimizer.skip_synchronize():
        job.optimizer.step()


@pytest.mark.parametrize("spec", one_in(3, [spec for spec in [*EACH_KIND, *WARMING_UP] if spec != "bf16"]))
def test_a_gradient_that_is_not_finite_on_one_rank_leaves_no_trace(spec: str) -> None:
    """The job with bad steps goes on as the one without, bit for bit."""
    disturbed, calm = Job(f"{spec}"), Job(f"{spec}")
    for step in range(3):
        before = leaves_of(disturbed.compression)
        reduce(disturbed, 50 + step, [math.nan, math.inf, -math.inf][step] if last() else 1.0)
        finite = [bool(p.grad.isfinite().all()) for p in disturbed.model.parameters() if p.grad is not None]
        assert everyone(finite) == [finite] * size() and not all(finite)
        after = leaves_of(disturbed.compression)
        assert step == 0 or before.keys() == after.keys()
        assert all(torch.equal(leaf, after[path]) for path, leaf in before.items())
        for job in (disturbed, calm):
            job.optimizer.zero_grad()
            job.run(range(step, step + 1))
    assert torch.equal(disturbed.weights, calm.weights)
    assert disturbed.compression.stats().steps == 6


def test_what_is_finite_is_right_beside_what_is_not() -> None:
    job, calm = Job("topk:ratio=1.0,min_size=0"), Job("topk:ratio=1.0,min_size=0")
    for one in (job, calm):
        reduce(one, 0)
    first, *others = job.model.parameters()
    hook = first.register_hook(lambda grad: grad * (math.nan if last() else 1.0))  # type: ignore[no-untyped-call]
    for one in (job, calm):
        reduce(one, 1)
    hook.remove()
    assert first.grad is not None and first.grad.isnan().all()
    for mine, its in zip(others, list(calm.model.parameters())[1:], strict=True):
        assert mine.grad is not None and its.grad is not None
        torch.testing.assert_close(mine.grad, its.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "powersgd:rank=2", "int8:feedback=on"])
def test_a_loss_scale_changes_nothing(spec: str) -> None:
    """Scales are powers of two, so that not a bit differs; one step overflows on one rank, and is skipped by all."""
    plain, scaled = Job(spec), Job(spec)
    scales = [2.0**10, 2.0**11, 2.0**11, 2.0**9]
    now = [1.0]
    scaled.compression.follow(lambda: now[0])
    for step, scale in enumerate(scales):
        now[0] = scale
        bad = step == 2
        reduce(scaled, step, math.inf if bad and last() else 1.0, scale)
        if not bad:
            apply(scaled, scale)
            reduce(plain, step)
            apply(plain)
    assert torch.equal(scaled.weights, plain.weights)
    assert_ranks_equal(scaled.weights)
    for path, leaf in leaves_of(plain.compression).items():
        assert torch.equal(leaf, leaves_of(scaled.compression)[path]), path


@pytest.mark.parametrize("scale", [0.0, -2.0, math.inf, math.nan])
def test_not_a_loss_scale(scale: float) -> None:
    job = Job("topk")
    job.compression.follow(lambda: scale)
    with pytest.raises(SpecError, match="must be a positive number"):
        job.run(1)


class Slopes(nn.Module):
    """A model whose gradients are what is asked for."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40, 40, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "scale", "largest"),
    [(torch.float16, 1.0, 6e4), (torch.float32, 2.0**20, 3e38), (torch.float32, 1.0, 3e38)],
)
def test_a_sum_that_overflows_leaves_no_trace(dtype: torch.dtype, scale: float, largest: float) -> None:
    """Each rank's gradient is finite, but their sum is not, or only in true units, or only in a wider dtype."""
    job = Job("topk:ratio=0.5", Slopes(dtype), mean=False)
    job.compression.follow(lambda: scale)
    for slope in (1.0, largest, 1.0):

        def loss(model: Any, x: Tensor, y: Tensor, slope: float = slope) -> Tensor:
            return torch.as_tensor((model.weight * slope).sum())

        before = leaves_of(job.compression)
        job.backward(0, loss)
        job.optimizer.synchronize()
        (parameter,) = job.model.parameters()
        assert parameter.grad is not None
        overflown = not bool(parameter.grad.isfinite().all())
        assert everyone(overflown) == [slope == largest] * size()
        if overflown:
            after = leaves_of(job.compression)
            assert before.keys() == after.keys() and all(torch.equal(before[path], after[path]) for path in before)
        else:
            job.optimizer.local.step()
        job.optimizer.zero_grad()
