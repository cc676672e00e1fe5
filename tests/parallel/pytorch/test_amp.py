"""Loss scaling: gradients come scaled, by a factor that changes; training and residuals are as if they did not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from parallel.pytorch.training import Job, assert_ranks_equal, batch, everyone, leaves_of
from torch import nn

from hvd_compress.errors import SpecError, UnsupportedError
from hvd_compress.torch import Compression

STEPS, BAD = 6, 3


def gradients(job: Job, step: int, scale: Callable[[Any], Any] = lambda loss: loss, overflow: bool = False) -> None:
    """Compute the gradients of a step, and reduce them."""
    x, y = batch(step)
    loss = nn.functional.cross_entropy(job.model(x), y)
    scale(loss * math.inf if overflow and hvd.rank() == 1 else loss).backward()
    job.optimizer.synchronize()


def train(job: Job, clip: bool) -> Job:
    """Without a loss scaler, and without the step that would overflow."""
    for step in range(STEPS):
        if step != BAD:
            gradients(job, step)
            if clip:
                nn.utils.clip_grad_norm_(job.model.parameters(), 0.5)
            with job.optimizer.skip_synchronize():
                job.optimizer.step()
            job.optimizer.zero_grad()
    return job


def train_scaled(job: Job, clip: bool, follow: bool = True) -> list[float]:
    """In the documented way, with a scale that grows every second step and is cut where one rank overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    if follow:
        job.compression.follow(scaler)
    scales = []
    for step in range(STEPS):
        gradients(job, step, scaler.scale, overflow=step == BAD)
        if clip:
            scaler.unscale_(job.optimizer)
            nn.utils.clip_grad_norm_(job.model.parameters(), 0.5)
        with job.optimizer.skip_synchronize():
            scaler.step(job.optimizer)
        scaler.update()
        job.optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize(("spec", "clip"), [("none", False), ("topk:ratio=0.05", True)])
def test_a_loss_scaler_changes_nothing(spec: str, clip: bool) -> None:
    """Scales are powers of two, so that not a bit differs. The step that overflows on one rank is skipped by all."""
    plain, scaled = train(Job(spec), clip), Job(spec)
    scales = train_scaled(scaled, clip)
    assert everyone(scales) == [[2.0**e for e in (10, 11, 11, 10, 10, 11)]] * hvd.size()
    assert torch.equal(scaled.weights, plain.weights)
    assert_ranks_equal(scaled.weights)
    for path, leaf in leaves_of(plain.compression).items():
        assert torch.equal(leaf, leaves_of(scaled.compression)[path]), path


def test_reduction_must_come_before_unscaling() -> None:
    job = Job("topk")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, y = batch(0)
    scaler.scale(nn.functional.cross_entropy(job.model(x), y)).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(UnsupportedError, match=r"call optimizer\.synchronize\(\) first") as error:
        scaler.step(job.optimizer)
    assert everyone(str(error.value)) == [str(error.value)] * hvd.size()


def test_a_disabled_scaler_does_no_harm() -> None:
    job, plain = Job("topk:ratio=0.05"), Job("topk:ratio=0.05")
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    job.compression.follow(scaler)
    for step in range(2):
        job.backward(step)
        scaler.step(job.optimizer)
        scaler.update()
        job.optimizer.zero_grad()
    assert torch.equal(job.weights, plain.run(2).weights)


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, "scaler", 1024.0, None])
def test_not_a_loss_scaler(scaler: Any) -> None:
    with pytest.raises(SpecError, match="pass a loss scaler with get_scale"):
        Compression.topk().follow(scaler)
