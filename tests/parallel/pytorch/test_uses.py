"""Ways of writing PyTorch that come together with a distributed optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from parallel.pytorch.training import Job, assert_ranks_equal, batch, everyone, make_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hvd_compress.torch import Compression, TorchCompressor

LOSSLESS, LOSSY = "topk:ratio=1.0", "topk:ratio=0.05"

Loss = Callable[..., Tensor]


def assert_as_plain(make: Callable[[Any], Job], loss: Loss | None = None, steps: int = 3) -> None:
    """Without loss it trains as stock Horovod does; with loss, ranks stay equal."""
    plain, lossless, lossy = (make(c).run(steps, loss) for c in (hvd.Compression.none, LOSSLESS, LOSSY))
    torch.testing.assert_close(lossless.weights, plain.weights, rtol=0, atol=2e-5)
    assert not torch.equal(lossy.weights, plain.weights)
    assert_ranks_equal(lossy.weights)


def test_several_parameter_groups() -> None:
    """With learning rates of their own; one holds nothing but frozen parameters."""

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        layers = [model.get_submodule(name) for name in ("0", "2", "4")]
        layers[1].requires_grad_(False)
        rates = zip(layers, (0.1, 9.0, 0.01), strict=True)
        return torch.optim.SGD([{"params": list(layer.parameters()), "lr": lr} for layer, lr in rates], momentum=0.9)

    def make(compression: Any) -> Job:
        return Job(compression, optimizer=sgd)

    frozen = make_model()[2].weight
    assert torch.equal(make(LOSSY).run(2).model.get_parameter("2.weight"), frozen)  # type: ignore[arg-type]
    assert_as_plain(make)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    def loss(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
        hidden = checkpoint(model[:4], x.requires_grad_(True), use_reentrant=reentrant)
        return nn.functional.cross_entropy(model[4](hidden), y)

    assert_as_plain(Job, loss)


def test_shared_weights() -> None:
    def make(compression: Any) -> Job:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 10))
        model[3].weight = model[2].weight
        return Job(compression, model)

    assert_as_plain(make)


@pytest.mark.long
def test_compiled_model() -> None:
    def make(compression: Any) -> Job:
        return Job(compression, torch.compile(make_model(), backend="aot_eager"))  # type: ignore[arg-type]

    assert_as_plain(make)


def test_adam_with_a_schedule() -> None:
    def make(compression: Any) -> Job:
        job = Job(compression, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))
        schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, 1, gamma=0.5)
        job.optimizer.register_step_post_hook(lambda *_: schedule.step())
        return job

    assert_as_plain(make)


def test_broadcasting_what_one_rank_has_loaded() -> None:
    """Ranks begin apart; rank 0's parameters and momenta are broadcast through the distributed optimizer."""
    job = Job(LOSSY).run(2)
    if hvd.rank() > 0:
        with torch.no_grad():
            for p in job.model.parameters():
                p.add_(hvd.rank())
                job.optimizer.state[p]["momentum_buffer"].mul_(1 + hvd.rank())
    hvd.broadcast_parameters(job.model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(job.optimizer, root_rank=0)
    assert_ranks_equal(job.weights)
    assert_ranks_equal(job.run(range(2, 5)).weights)


def test_broadcasting_the_state_of_an_optimizer_that_has_none_yet() -> None:
    """Horovod makes a step of zeros for it, without our being asked; training is as without it."""
    jobs = [Job(LOSSY), Job(LOSSY)]
    hvd.broadcast_optimizer_state(jobs[0].optimizer, root_rank=0)
    assert torch.equal(jobs[0].run(3).weights, jobs[1].run(3).weights)


def adversaries(compress: Callable[[], Any]) -> list[Job]:
    """A generator and a critic, each with an optimizer and a compressor of its own, trained in turns."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(2)]
    generator, critic = (Job(compress(), model, lr=0.05, momentum=0) for model in models)
    for step in range(4):
        noise, _ = batch(step)
        real, _ = batch(100 + step)
        critic.optimizer.zero_grad()
        (critic.model(generator.model(noise).detach()).mean() - critic.model(real + 1).mean()).backward()
        critic.optimizer.step()
        generator.optimizer.zero_grad()
        critic.model.requires_grad_(False)
        (-critic.model(generator.model(noise)).mean()).backward()
        critic.model.requires_grad_(True)
        generator.optimizer.step()
    return [generator, critic]


def test_two_optimizers_in_turns() -> None:
    plain = adversaries(lambda: hvd.Compression.none)
    lossless = adversaries(lambda: Compression.parse(LOSSLESS))
    lossy = adversaries(lambda: Compression.parse(LOSSY))
    one: TorchCompressor = Compression.parse(LOSSY)
    together = adversaries(lambda: one)
    for a, b, c, d in zip(plain, lossless, lossy, together, strict=True):
        torch.testing.assert_close(b.weights, a.weights, rtol=0, atol=2e-5)
        assert_ranks_equal(c.weights)
        assert torch.equal(c.weights, d.weights)  # models of the same names, told apart by their parameters


def test_gradients_by_hand() -> None:
    """Without any backward: `synchronize` hands over what stands in ``grad``, and zeros where nothing does."""
    job = Job(LOSSLESS, momentum=0)
    first, *others = job.model.parameters()
    first.grad = torch.full_like(first, float(hvd.rank()))
    job.optimizer.synchronize()
    mean = sum(everyone(float(hvd.rank()))) / hvd.size()
    assert torch.equal(first.grad, torch.full_like(first, mean))
    assert all(p.grad is not None and not p.grad.any() for p in others)
