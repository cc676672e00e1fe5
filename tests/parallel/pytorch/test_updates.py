"""``preconditioned=on``: what plain SGD is given are updates, and nothing else is applied."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch
from parallel.pytorch.ddp_training import loss_of, weights
from parallel.pytorch.training import SIZE, Job, assert_ranks_equal, batch, make_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.torch
from hvd_compress.distributed import Compression
from hvd_compress.errors import SpecError, UnsupportedError

pytestmark = pytest.mark.usefixtures("process_group")

SPEC = "ctk:ratio=0.1,chunk=64,preconditioned=on"
VECTORS = "topk:ratio=1,min_size=0,vectors=on,preconditioned=on,beta2=0.9"


class Training:
    """A model with `DistributedDataParallel` and the optimizer that the compression hands out."""

    def __init__(self, spec: str = SPEC, model: nn.Module | None = None, beta1: float = 0.0, **options: Any) -> None:
        self.model = make_model() if model is None else model
        self.wrapped = DistributedDataParallel(self.model, **options)
        self.compression = Compression.parse(spec, merge=2)
        self.optimizer = self.compression.optimizer(self.model, lr=0.01, weight_decay=0.1, beta1=beta1)
        self.compression.register(self.wrapped, optimizer=self.optimizer)

    def run(self, *steps: int) -> Training:
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.wrapped, step).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return self


@pytest.mark.parametrize(("warmup", "beta1"), [(0, 0.0), (4, 0.5)])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.005}], ids=str)
def test_ddp_trains_as_horovod_does(options: dict[str, Any], warmup: int, beta1: float) -> None:
    """Bit for bit, where ranks are summed in the same order."""
    spec = f"{SPEC},min_size=0,vectors=on,warmup={warmup}"
    compression = hvd_compress.torch.Compression.parse(spec, merge=2)
    job = Job(compression, optimizer=lambda model: compression.optimizer(model, 0.01, 0.1, beta1)).run(5)
    training = Training(spec, beta1=beta1, **options).run(*range(5))
    assert_ranks_equal(job.weights)
    assert torch.equal(weights(training.model), job.weights)


class Vectors(nn.Module):
    """A model without matrices, so that second moments are kept in full."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(32)), nn.Parameter(torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.shift)[:, :10]


@pytest.mark.parametrize("beta1", [0.0, 0.5])
def test_without_loss_each_rank_adds_its_share_of_adamw(beta1: float) -> None:
    """The mean over the ranks of what AdamW without momentum would do on each; with beta1, its running mean."""
    training, x = Training(VECTORS, Vectors(), beta1), [torch.ones(32), torch.zeros(32)]
    means: list[Tensor] = []
    parts = [[p.clone().requires_grad_() for p in x] for _ in range(SIZE)]
    optimizers = [torch.optim.AdamW(own, lr=0.01, betas=(0.0, 0.9), weight_decay=0.0) for own in parts]
    model = Vectors()
    for step in range(5):
        training.run(step)
        moves = [torch.zeros(32), torch.zeros(32)]
        for rank, (own, optimizer) in enumerate(zip(parts, optimizers, strict=True)):
            generator = torch.Generator().manual_seed(1000 * step + rank)
            data = torch.randn(16, 32, generator=generator)
            model.scale.data, model.shift.data = x[0].clone(), x[1].clone()
            loss = nn.functional.cross_entropy(model(data), data[:, :10].argmax(1))
            for p, value, grad in zip(own, x, torch.autograd.grad(loss, [*model.parameters()]), strict=True):
                p.data, p.grad = value.clone(), grad
            optimizer.step()
            moves = [move + (p.detach() - value) / SIZE for move, p, value in zip(moves, own, x, strict=True)]
        moves = [move - 0.01 * 0.1 * value for value, move in zip(x, moves, strict=True)]
        means = [mean.lerp(move, 1 - beta1) for mean, move in zip(means or moves, moves, strict=True)]
        x = [value + mean for value, mean in zip(x, means, strict=True)]
    torch.testing.assert_close(weights(training.model), torch.cat(x).double(), rtol=0, atol=1e-5)


def test_a_job_goes_on_bit_for_bit() -> None:
    straight, first = Training().run(*range(6)), Training().run(*range(3))
    second = Training(model=first.model)
    second.compression.load_state_dict(first.compression.state_dict())
    second.run(*range(3, 6))
    assert torch.equal(weights(second.model), weights(straight.model))


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_optimizers_that_would_change_updates_are_refused(make: Any) -> None:
    wrapped = DistributedDataParallel(make_model())
    with pytest.raises(UnsupportedError, match=rf"{make.__name__} is not supported with ctk.*compression\.optimizer"):
        Compression.parse(SPEC).register(wrapped, optimizer=make(wrapped.parameters()))
    with pytest.raises(UnsupportedError, match=rf"{make.__name__} is not supported with ctk"):
        Job(hvd_compress.torch.Compression.parse(SPEC), optimizer=lambda model: make(model.parameters())).run(1)


def test_what_else_is_refused() -> None:
    wrapped = DistributedDataParallel(make_model())
    with pytest.raises(
        UnsupportedError, match=r"momentum of 0\.9, .* running mean, .*compression\.optimizer\(.*beta1="
    ):
        groups: Any = [{"params": [p], "momentum": 0.9} for p in wrapped.parameters()]
        groups[0] |= {"momentum": 0.95, "dampening": 0.95}
        Compression.parse(SPEC).register(wrapped, optimizer=torch.optim.SGD(groups))
    with pytest.raises(UnsupportedError, match=r"momentum of 0\.5, which is not supported with dgc"):
        damped = torch.optim.SGD(wrapped.parameters(), momentum=0.5, dampening=0.5)
        Compression.dgc().register(wrapped, optimizer=damped)
    with pytest.raises(SpecError, match=r"beta1=1\.0 is not allowed: beta1 must be in \[0, 1\)"):
        Compression.parse(SPEC).optimizer(wrapped, lr=0.1, beta1=1.0)
    with pytest.raises(UnsupportedError, match="delivers updates, which only plain SGD can apply"):
        Compression.parse(SPEC).register(wrapped)
    with pytest.raises(UnsupportedError, match=r"optimizer is for preconditioned=on: topk delivers gradients"):
        Compression.topk().optimizer(wrapped, lr=0.1)
    sparse = nn.Embedding(50, 40, sparse=True)
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match="sparse gradient of an Embedding with sparse=True is not supported"):
        Compression.parse(SPEC).register(DistributedDataParallel(sparse), optimizer=optimizer)


@pytest.mark.parametrize(("beta1", "warns"), [(0.5, False), (0.9, True)])
def test_a_momentum_on_top_of_the_residual_is_warned_of(
    beta1: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    Training(f"{SPEC},beta2=0.91", beta1=beta1)
    assert (f"with beta1={beta1} on top, training loses much" in caplog.text) == (warns and hvd.rank() == 0)


def clip(training: Training) -> None:
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)


def divide(training: Training) -> None:
    for p in training.model.parameters():
        if p.grad is not None:
            p.grad = p.grad / 2


@pytest.mark.parametrize("change", [clip, divide])
def test_updates_that_were_changed_are_refused(change: Any) -> None:
    training = Training().run(0)
    loss_of(training.wrapped, 1).backward()  # type: ignore[no-untyped-call]
    change(training)
    with pytest.raises(UnsupportedError, match=r"instead of torch\.nn\.utils\.clip_grad_norm_, .*clip_norm"):
        training.optimizer.step()


def test_updates_that_are_clipped_after_synchronize_are_refused() -> None:
    compression = hvd_compress.torch.Compression.parse(SPEC)
    job = Job(compression, optimizer=lambda model: compression.optimizer(model, lr=0.01)).run(1)
    job.backward(1)
    job.optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
    with pytest.raises(UnsupportedError, match="clip_norm"), job.optimizer.skip_synchronize():
        job.optimizer.step()


def test_a_loss_scaler_changes_nothing() -> None:
    """Residuals and second moments are of unscaled gradients; the scaler divides updates that were multiplied."""
    calm, scaled = Training().run(*range(4)), Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scaled.compression.follow(scaler)
    for step in range(4):
        scaled.optimizer.zero_grad()
        x, y = batch(step)
        scaler.scale(nn.functional.cross_entropy(scaled.wrapped(x), y)).backward()  # type: ignore[no-untyped-call]
        scaler.step(scaled.optimizer)
        scaler.update()
    torch.testing.assert_close(weights(scaled.model), weights(calm.model), rtol=0, atol=1e-5)


def test_a_parameter_that_is_used_late_is_not_moved_further_than_others() -> None:
    """Its second moments begin with its first gradient, as those of Adam do."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.late = nn.Linear(32, 10), nn.Linear(32, 10)
            self.uses = False

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.first(x)
            return out + self.late(x) if self.uses else out

    torch.manual_seed(0)
    model = Late()
    training = Training("topk:ratio=1,min_size=0,preconditioned=on", model, find_unused_parameters=True).run(*range(20))
    model.uses = True
    before = model.late.weight.detach().clone()
    training.run(20)
    moved = (model.late.weight.detach() - before * (1 - 0.01 * 0.1)).abs().max()
    assert 0 < float(moved) < 2.5 * 0.01  # of the order of lr; 4.5 times that if moments had been zero for 20 steps


def test_one_rank_of_horovod_gets_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod does not call its compression there."""
    compression, parameters = hvd_compress.torch.Compression.parse(f"{SPEC},beta2=0.9"), [nn.Parameter(torch.ones(3))]
    assert type(compression.optimizer(parameters, lr=0.01)) is torch.optim.SGD
    world = hvd_compress.torch.Compression.none._world()._replace(size=1)
    monkeypatch.setattr(type(compression), "_world", lambda self: world)
    optimizer = compression.optimizer([{"params": parameters, "lr": 0.5}], lr=0.01, weight_decay=0.3, beta1=0.5)
    (group,) = optimizer.param_groups
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.5, 0.9), 0.3)
    assert hvd.size() == SIZE
