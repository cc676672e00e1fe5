"""Programs that stock Horovod trains, and what may be looked at while they run."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from parallel.pytorch.training import Job, assert_ranks_equal, batch, everyone, leaves_of
from torch import Tensor, nn

from hvd_compress.errors import DisagreementError
from hvd_compress.torch import Compression, TorchCompressor

ALL_KINDS = pytest.mark.parametrize("spec", ["none", "topk:ratio=0.05"])
LOSSLESS = pytest.mark.parametrize("spec", ["none", "topk:ratio=1.0,min_size=0,vectors=on"])


def last() -> bool:
    """Whether this is the last rank."""
    return bool(hvd.rank() == hvd.size() - 1)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return nn.functional.cross_entropy(model(x), y)


class Heads:
    """A trunk with two heads; an optimizer for the trunk and the first, another one for the second.

    Args:
        prefix: Of the names of the parameters.
        compression: Of both.
    """

    def __init__(self, prefix: str, compression: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.trunk, self.a, self.b = nn.Linear(32, 60), nn.Linear(60, 10), nn.Linear(60, 10)
        parts = [{"t": self.trunk, "a": self.a}, {"b": self.b}]
        self.optimizers = [
            hvd.DistributedOptimizer(
                torch.optim.SGD([p for m in part.values() for p in m.parameters()], lr=0.1),
                named_parameters=[
                    (f"{prefix}.{n}.{m}", p) for n, module in part.items() for m, p in module.named_parameters()
                ],
                compression=compression,
            )
            for part in parts
        ]

    def run(self, steps: int, without: Callable[[int], bool]) -> Tensor:
        """Train; gives all weights.

        Args:
            steps: How many.
            without: Whether this rank has no loss for the second head in a step.
        """
        for step in range(steps):
            x, y = batch(step)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            h = torch.relu(self.trunk(x))
            loss = nn.functional.cross_entropy(self.a(h), y)
            if not without(step):
                loss = loss + nn.functional.cross_entropy(self.b(h), y)
            loss.backward()  # type: ignore[no-untyped-call]
            for optimizer in self.optimizers:
                optimizer.step()
        modules = (self.trunk, self.a, self.b)
        return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


@ALL_KINDS
def test_a_rank_without_a_loss_for_the_second_optimizer_in_its_first_step(spec: str) -> None:
    weights = Heads("two", Compression.parse(spec)).run(4, lambda step: step == 0 and last())
    assert_ranks_equal(weights)


@LOSSLESS
def test_two_optimizers_are_as_with_stock_horovod(spec: str) -> None:
    mine, stock = (
        Heads(name, compression).run(3, lambda step: step == 0 and last())
        for name, compression in (("ours", Compression.parse(spec)), ("stock", hvd.Compression.none))
    )
    torch.testing.assert_close(mine, stock, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("merge", ["layer", "search"])
@pytest.mark.parametrize("spec", ["topk:ratio=1.0,min_size=0,vectors=on", "powersgd:rank=32,min_size=0,min_gain=0"])
def test_optimizers_step_in_another_order_on_each_rank(spec: str, merge: str) -> None:
    """As by a loop over a set of them: all gradients are on their way by then."""

    def run(name: str, compression: Any) -> Tensor:
        heads = Heads(name, compression)
        if last():
            heads.optimizers.reverse()
        return heads.run(25, lambda step: False)

    mine, stock = run(f"ours.{merge}", Compression.parse(spec, merge=merge)), run("stock", hvd.Compression.none)
    torch.testing.assert_close(mine, stock, rtol=1e-4, atol=1e-5)


class Summed(torch.autograd.Function):
    """Sums gradients over the ranks in the backward pass, as a synchronised batch norm does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        summed: Tensor = hvd.allreduce(grad, name="in.backward")
        return summed


class Normed(nn.Module):
    """Ranks wait for each other in the backward pass; the last one does not use a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.other = nn.Linear(32, 16), nn.Linear(16, 10), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = Summed.apply(self.first(x))  # type: ignore[no-untyped-call]
        out: Tensor = self.head(h)
        return out if last() else out + self.other(h)


@ALL_KINDS
def test_ranks_that_wait_for_each_other_in_the_backward_pass(spec: str) -> None:
    torch.manual_seed(3)
    job = Job(spec, Normed()).run(3)
    assert_ranks_equal(job.weights)


@pytest.mark.parametrize("spec", ["fp16", "topk:ratio=0.05"])  # none: Horovod works in place
def test_gradients_in_sight_are_local_or_reduced(spec: str) -> None:
    job = Job(spec, momentum=0)
    for step in range(5):
        job.optimizer.zero_grad()
        local = torch.autograd.grad(loss_of(job.model, step), list(job.model.parameters()))
        job.backward(step)
        seen = [p.grad.clone() for p in job.model.parameters() if p.grad is not None]
        job.optimizer.synchronize()
        reduced = [p.grad.clone() for p in job.model.parameters() if p.grad is not None]
        with job.optimizer.skip_synchronize():
            job.optimizer.step()
        for mine, one, all_ranks in zip(local, seen, reduced, strict=True):
            assert torch.equal(one, mine) or torch.equal(one, all_ranks)


def test_a_step_given_up_and_zeroed_in_place_keeps_the_residual() -> None:
    job, calm = Job("topk:ratio=0.05").run(2), Job("topk:ratio=0.05").run(2)
    job.backward(77)
    job.optimizer.load_state_dict(job.optimizer.state_dict())
    for p in job.model.parameters():
        assert p.grad is not None
        p.grad.zero_()
    for other in (job, calm):
        other.run(range(2, 4))
    assert torch.equal(job.weights, calm.weights)


@pytest.mark.parametrize("how", ["in place", "by another"])
def test_who_changes_gradients_before_they_are_reduced_is_told(how: str) -> None:
    job = Job("topk:ratio=0.05").run(1)
    job.backward(1)
    for p in job.model.parameters():
        assert p.grad is not None
        if how == "in place":
            p.grad.mul_(0.5)
        else:
            p.grad = p.grad * 0.5
    with pytest.warns(UserWarning, match=r"call optimizer.synchronize\(\) first"):
        job.optimizer.step()
    job.optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job.backward(2)
        job.optimizer.synchronize()
        nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)
        with job.optimizer.skip_synchronize():
            job.optimizer.step()


def test_sparse_gradients_are_counted_but_not_compressed(caplog: pytest.LogCaptureFixture) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(500, 48, sparse=True), nn.Linear(48, 10)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.table((x[:, :4] * 100).long().abs() % 500).mean(1))
            return out

    torch.manual_seed(1)
    job = Job("topk:ratio=0.05,min_size=0", Words(), momentum=0).run(3)
    leaves = leaves_of(job.compression)
    assert sum(leaf.numel() for path, leaf in leaves.items() if path.endswith("residual")) == 48 * 10
    rows = 16 * 4  # a batch of 16 looks up 4 words each: an int64 and 48 numbers
    assert job.compression.stats().gradient_bytes == 3 * (4 * (48 * 10 + 10) + rows * (8 + 48 * 4))
    assert job.compression.stats().bytes_sent > 3 * rows * (8 + 48 * 4)
    said = [one for one in caplog.messages if "a sparse gradient of shape (500, 48) is not compressed" in one]
    assert len(said) == (hvd.rank() == 0)
    assert_ranks_equal(job.weights)


@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "powersgd:rank=2"])
def test_discarded_steps_leave_no_trace(spec: str) -> None:
    skipping, calm = Job(spec, momentum=0), Job(spec, momentum=0)
    for step in [90, 0, 1, 91, 92, 2, 3]:
        for job in (skipping, calm) if step < 90 else (skipping,):
            job.optimizer.zero_grad()
            job.backward(step)
            job.optimizer.synchronize()
            if step < 90:
                with job.optimizer.skip_synchronize():
                    job.optimizer.step()
            else:
                job.compression.discard()
    assert torch.equal(skipping.weights, calm.weights)
    for path, leaf in leaves_of(calm.compression).items():
        assert torch.equal(leaf, leaves_of(skipping.compression)[path]), path


def told(job: Job, step: int) -> str:
    """The error of a step, the same on all ranks."""
    with pytest.raises(DisagreementError) as error:
        job.run(range(step, step + 1))
    words = everyone(str(error.value))
    assert words == words[:1] * hvd.size()
    return str(words[0])


def test_discard_on_one_rank_is_told_to_all() -> None:
    job = Job("randomk:ratio=0.05").run(2)
    if last():
        job.compression.discard()
    assert "the restored state: rank 0 has 'step 2" in told(job, 2)


def test_an_optimizer_made_anew_on_one_rank_goes_on() -> None:
    job, calm = Job("topk:ratio=0.05", momentum=0), Job("topk:ratio=0.05", momentum=0)
    for step in range(4):
        if step == 2 and last():
            import gc

            job.optimizer = None
            gc.collect()
            job = Job(job.compression, job.model, momentum=0)
        for one in (job, calm):
            one.run(range(step, step + 1))
    assert torch.equal(job.weights, calm.weights)


def test_hooks_on_several_threads() -> None:
    """Autograd calls hooks from a thread for each device; here from eight, all at once."""
    for turn in range(2):
        sizes = [(40, 30)] * 24
        parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
        compression: TorchCompressor = Compression.topk(ratio=0.1, min_size=0, merge=5)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0),
            named_parameters=[(f"threads.{turn}.{i}", p) for i, p in enumerate(parameters)],
            compression=compression,
        )
        for step in range(3):
            generator = torch.Generator().manual_seed(100 * step + hvd.rank())
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=generator)
            start = threading.Barrier(8)

            def give(part: list[nn.Parameter], start: threading.Barrier = start, o: Any = optimizer) -> None:
                start.wait()
                for p in part:
                    handle, ctx = o._allreduce_grad_async(p)
                    o._allreduce_delay[p] = 0
                    o._handles[p] = (handle, ctx)

            threads = [threading.Thread(target=give, args=(parameters[i::8],)) for i in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            optimizer.step()
        assert_ranks_equal(torch.cat([p.detach().flatten() for p in parameters]))
        assert compression.stats().steps == 3
