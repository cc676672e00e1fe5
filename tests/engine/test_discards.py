"""Gradients that are reduced and cleared before an optimizer applies them, as those of a GAN's other net."""

from __future__ import annotations

import pytest
import torch
from engine.ranks import Job, assert_ranks_equal, everyone, leaves_of, rank, size
from torch import Tensor

from hvd_compress.core.bucketing import pin

pytestmark = [pytest.mark.usefixtures("on_ranks"), pytest.mark.matched("names", "channels", "turns")]


class Ledger:
    """What the ranks gave to be reduced, and what they received."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.given = self.received = self.absolute = 0.0
        for parameter in job.model.parameters():
            parameter.register_hook(self._count)  # type: ignore[no-untyped-call]

    def _count(self, grad: Tensor) -> None:
        self.given += float(grad.double().sum())
        self.absolute += float(grad.double().abs().sum())

    def _gradient(self) -> float:
        grads = [p.grad for p in self.job.model.parameters() if p.grad is not None]
        return float(torch.stack([grad.double().sum() for grad in grads]).sum()) if grads else 0.0

    def reduce(self, step: int) -> None:
        """Compute gradients and reduce them, with those that are there."""
        self.given += self._gradient()
        self.job.backward(step)
        self.job.optimizer.synchronize()
        self.received += size() * self._gradient()

    def apply(self) -> None:
        """Apply and clear the gradients."""
        with self.job.optimizer.skip_synchronize():
            self.job.optimizer.step()
        self.job.optimizer.zero_grad()

    def outstanding(self) -> float:
        """Return the part of the given gradients that was neither received nor is kept."""
        return float(abs(sum(everyone(self.given - self._kept())) - self.received) / self.absolute)

    def begin(self) -> None:
        """Count from here on; what is kept counts as given."""
        self.given, self.received = self._kept(), 0.0

    def _kept(self) -> float:
        leaves = leaves_of(self.job.compression)
        return sum(float(leaf.double().sum()) for path, leaf in leaves.items() if path.endswith("residual"))


@pytest.mark.parametrize("none", [True, False])
@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "powersgd:rank=2", "efsignsgd:twoway=on", "loco"])
def test_gradients_that_no_step_followed_leave_no_trace(spec: str, none: bool) -> None:
    gan, calm = Job(spec), Job(spec)
    for step in [0, 90, 1, 91, 92, 2, 93, 3]:
        gan.model.zero_grad(set_to_none=none)
        gan.backward(step)
        gan.optimizer.synchronize()
        if step == 91:
            for job in (gan, calm):
                job.reducer._buckets.change(pin(()))  # as a search for better ones does
        if step < 90:
            with gan.optimizer.skip_synchronize():
                gan.optimizer.step()
            calm.run(range(step, step + 1))
    assert torch.equal(gan.weights, calm.weights)
    assert gan.reducer.steps == 4
    assert_ranks_equal(gan.weights)


def test_gradients_that_accumulate_over_reduced_ones_are_not_undone() -> None:
    ledger = Ledger(Job("topk:ratio=0.05"))
    for step in range(6):
        ledger.reduce(step)
        if step % 3 == 2:
            ledger.apply()
    assert ledger.outstanding() < 1e-6


def test_what_one_rank_alone_has_cleared_is_not_undone() -> None:
    ledger = Ledger(Job("topk:ratio=0.05"))
    for step in range(6):
        ledger.reduce(step)
        if step % 3 == 2:
            ledger.apply()
        elif rank() == size() - 1:
            ledger.job.optimizer.zero_grad()
    assert ledger.outstanding() < 1e-6


def test_gradients_that_a_program_applies_itself_are_not_undone() -> None:
    ledger = Ledger(Job("topk:ratio=0.05"))
    for step in range(4):
        ledger.reduce(step)
        for parameter in ledger.job.model.parameters():
            assert parameter.grad is not None
            parameter.data -= 0.1 * parameter.grad
        ledger.job.optimizer.zero_grad()
    assert ledger.outstanding() < 1e-6


def test_a_program_that_adds_reduced_gradients_up_itself_is_left_alone_after_its_first_step() -> None:
    job = Job("topk:ratio=0.05")
    ledger = Ledger(job)
    for step in range(3):
        if step == 1:
            ledger.begin()
        kept = []
        for part in range(2):
            ledger.reduce(2 * step + part)
            kept.append([p.grad.clone() for p in job.model.parameters() if p.grad is not None])
            job.optimizer.zero_grad()
        for parameter, *grads in zip(job.model.parameters(), *kept, strict=True):
            parameter.grad = sum(grads)
        ledger.apply()
    assert ledger.outstanding() < 1e-6


def test_an_optimizer_that_reduces_within_its_step_applies_all_it_reads() -> None:
    job = Job("topk:ratio=0.05")
    ledger = Ledger(job)

    def closure() -> Tensor:
        job.optimizer.zero_grad()
        ledger.reduce(0)
        return job.weights.sum()

    job.optimizer.local = torch.optim.LBFGS(job.model.parameters(), max_iter=3)  # type: ignore[assignment]
    for _ in range(2):
        job.optimizer.local.step(closure)
    assert ledger.outstanding() < 1e-6
