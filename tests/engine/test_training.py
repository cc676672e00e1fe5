"""With loss: training converges, and ranks never drift apart."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from catalogue import one_in
from engine.ranks import Compression, Job, assert_ranks_equal, batch, everyone, rank, size
from torch import Tensor, nn

from hvd_compress.ops.torch import TorchOps

pytestmark = pytest.mark.usefixtures("on_ranks")

LOSSY = [
    "topk:ratio=0.01",
    "topk:ratio=0.01,values=fp16,dense=fp16",
    "topk:ratio=0.01,start=3,warmup=8",
    "randomk:ratio=0.2,unbiased=on",
    "int8:feedback=on",
    "fp16:feedback=on",
    "powersgd:rank=2",
    "acpsgd:rank=2",
    "dgc:ratio=0.05",
    "loco",
    "onebit:twoway=on",
]


class Branches(nn.Module):
    """Three branches that can be used in any order or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(32, 64) for _ in range(3))
        self.head = nn.Linear(64, 10)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 10)

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        hidden = sum((self.branches[i](x).relu() for i in order), torch.zeros(1))
        logits: Tensor = self.head(hidden)
        return logits


def loss_of(model: Branches, x: Tensor, y: Tensor, order: list[int]) -> Tensor:
    return nn.functional.cross_entropy(model(x, order), y)


@pytest.mark.parametrize(("spec", "merge"), one_in(3, [*((spec, 2) for spec in LOSSY), (LOSSY[0], "layer")]))
def test_ranks_stay_equal_whatever_the_order(spec: str, merge: int | str) -> None:
    """Each rank computes its gradients in another order, and one leaves a branch out now and then."""
    order = [[0, 1, 2], [2, 1, 0], [1, 2, 0]][rank() % 3]
    used: list[int] = []
    job = Job(Compression.parse(spec, merge=merge), Branches(), lr=0.02, momentum=0.0 if "dgc" in spec else 0.9)
    for step in range(20):
        left_out = rank() == 1 and step % 5 == 2
        job.backward(step, lambda m, x, y, use=order[:2] if left_out else order: loss_of(m, x, y, use))
        used.append(sum(p.grad is not None for p in job.model.parameters()))
        job.optimizer.step()
        job.optimizer.zero_grad()
    assert_ranks_equal(job.weights)
    assert len(set(used)) == (2 if rank() == 1 else 1)
    x, y = batch(9999)
    assert sum(everyone(loss_of(job.model, x, y, [0, 1, 2]).item())) / size() < 2.25  # type: ignore[arg-type]


def test_accumulated_passes_are_one_step() -> None:
    """Two passes over half of a batch each: the sum of their gradients, reduced once."""
    spec = "topk:ratio=1.0,min_size=0"
    twice, once = Job(spec, passes=2).run(3), Job(spec, passes=1)
    for step in range(3):
        for part in range(2):
            x, y = batch(2 * step + part)
            loss = nn.functional.cross_entropy(once.model(x), y)
            grads = torch.autograd.grad(loss, list(once.model.parameters()))
            for p, grad in zip(once.model.parameters(), grads, strict=True):
                p.grad = grad if p.grad is None else p.grad + grad
        once.optimizer.step()
        once.optimizer.zero_grad()
    torch.testing.assert_close(twice.weights, once.weights, rtol=0, atol=1e-6)
    assert twice.compression.stats().steps == once.compression.stats().steps == 3


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "qsgd"])
def test_results_lie_where_the_gradients_were(spec: str) -> None:
    job = Job(spec).run(1)
    job.backward(1)
    places = [p.grad.data_ptr() for p in job.model.parameters() if p.grad is not None]
    job.optimizer.synchronize()
    assert [p.grad.data_ptr() for p in job.model.parameters() if p.grad is not None] == places
    assert len(places) == 6


def test_delayed_ranks_meet_again_at_each_correction() -> None:
    """Between corrections each is a step of its own ahead."""
    job = Job("topk:ratio=0.05,delay=4", lr=0.5)
    start = mean_loss(job.model)
    for step in range(40):
        job.run(range(step, step + 1))
        if step >= 36:
            apart = max(float((other - job.weights).abs().max()) for other in everyone(job.weights))
            assert apart < 1e-6 if step % 4 == 3 else apart > 1e-4
    assert mean_loss(job.model) < start - 0.2


def mean_loss(model: nn.Module) -> float:
    """Over batches that nobody has trained on, of all ranks."""
    x, y = (torch.cat(parts) for parts in zip(*map(batch, range(9000, 9010)), strict=True))
    return float(sum(everyone(nn.functional.cross_entropy(model(x), y).item())) / size())


def test_two_optimizers_share_a_compressor_and_nothing_else() -> None:
    compression = Compression.topk(ratio=0.05, merge=2)
    alone = Job("topk:ratio=0.05").run(6)
    first, second = Job(compression), Job(compression, Branches(), lr=0.02)
    for step in range(6):
        first.run(range(step, step + 1))
        second.run(range(step, step + 1), lambda m, x, y: loss_of(m, x, y, [0, 1, 2]))
    assert torch.equal(first.weights, alone.weights)


def test_error_on_request() -> None:
    """Without loss it is zero, with loss it is not, and otherwise nobody asked."""
    assert Job("topk:ratio=0.05").run(3).compression.stats().vnmse is None
    assert Job("topk:ratio=1.0,measure=on").run(3).compression.stats().vnmse == pytest.approx(0, abs=1e-12)
    error = Job("topk:ratio=0.05,measure=on").run(3).compression.stats().vnmse
    assert error is not None and 0.1 < error < 2
    assert everyone(error) == [error] * size()


@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "qsgd", "powersgd:rank=2"])
def test_nothing_of_a_step_stays_when_it_is_over(spec: str) -> None:
    """Its gradients and payloads go at once, not when garbage is next collected."""
    job = Job(spec).run(2)
    gc.collect()
    gc.disable()
    try:
        job.backward(2)
        assert job.reducer.step is not None
        step = weakref.ref(job.reducer.step)
        job.optimizer.step()
        assert step() is None
    finally:
        gc.enable()


def test_a_step_inside_autocast_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the operations of a GPU, where products of matrices are delivered, which autocast would form in 16 bits."""
    monkeypatch.setattr("hvd_compress.torch.bucket_state.torch_ops", TorchOps)
    jobs = [Job("powersgd:rank=2,min_size=0"), Job("powersgd:rank=2,min_size=0")]
    for step in range(3):
        for job, cast in zip(jobs, (False, True), strict=True):
            x, y = batch(step)
            nn.functional.cross_entropy(job.model(x), y).backward()  # type: ignore[no-untyped-call]
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                job.optimizer.step()
            job.optimizer.zero_grad()
    assert torch.equal(jobs[0].weights, jobs[1].weights)
