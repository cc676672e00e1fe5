"""``auto`` with DistributedDataParallel and with Horovod: ranks stay equal, and no sum is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from parallel.pytorch.ddp_training import loss_of, weights
from parallel.pytorch.race_clock import CANDIDATES, ENOUGH, FP16, NONE, QSGD, TOPK, Clock, race_of
from parallel.pytorch.training import SIZE, Job, assert_ranks_equal, make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import hvd_compress.torch
from hvd_compress.distributed import Compression, DistributedCompressor, hook
from hvd_compress.engine.race import Trial
from hvd_compress.errors import UnsupportedError


class Training:
    """A model in DistributedDataParallel, and a copy of it without compression."""

    def __init__(self, clock: Clock, make: Callable[[], nn.Module] = make_model, **options: Any) -> None:
        self.compression: DistributedCompressor = Compression.auto(candidates=CANDIDATES, merge=2)
        clock.compression = self.compression
        self.mine, self.plain = (DistributedDataParallel(make(), **options) for _ in range(2))
        self.plain.module.load_state_dict(self.mine.module.state_dict())
        self.optimizers: list[Optimizer] = [
            torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (self.mine, self.plain)
        ]
        self.registered = self.compression.registered(self.mine, optimizer=self.optimizers[0])
        self.mine.register_comm_hook(self.registered, hook)

    def run(self, steps: range, scale: float = 1.0) -> None:
        """Make steps of both, with a loss times a factor that gradients are divided by afterwards."""
        for step in steps:
            for model, optimizer in zip((self.mine, self.plain), self.optimizers, strict=True):
                (scale * loss_of(model, step)).backward()  # type: ignore[no-untyped-call]
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad /= scale
                optimizer.step()
                optimizer.zero_grad()

    def follow_plain(self) -> None:
        """Continue with the same weights and momentum."""
        self.mine.module.load_state_dict(self.plain.module.state_dict())
        self.optimizers[0].load_state_dict(copy.deepcopy(self.optimizers[1].state_dict()))


class Unused(nn.Module):
    """A model of which a layer is used in every second step only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.last = nn.Linear(32, 16), nn.Linear(16, 16), nn.Linear(16, 10)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.first(x).relu()
        return self.last(self.sometimes(x) if self.calls % 2 else x)  # type: ignore[no-any-return]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.005}])
def test_without_compression_it_is_plain_ddp(clock: Clock, options: dict[str, Any]) -> None:
    """From the step after it has chosen no compression, results are equal bit for bit."""
    job = Training(clock, **options)
    job.run(range(ENOUGH))
    assert race_of(job.compression).choice == NONE
    assert_ranks_equal(weights(job.mine))
    job.follow_plain()
    job.run(range(ENOUGH, ENOUGH + 30))
    atol = 0.0 if SIZE == 2 else 1e-6  # plain DDP divides by the number of ranks before it sums
    torch.testing.assert_close(weights(job.mine), weights(job.plain), rtol=0, atol=atol)
    assert job.compression.stats().chosen == "none" and job.compression.stats().steps == ENOUGH + 30


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.005}])
def test_no_sum_overflows_in_half_precision(clock: Clock, options: dict[str, Any]) -> None:
    """Gradients a million times as large as float16 can hold are summed as without compression."""
    clock.fastest = FP16
    job = Training(clock, **options)
    job.run(range(ENOUGH))
    assert race_of(job.compression).choice == FP16
    assert_ranks_equal(weights(job.mine))
    job.follow_plain()
    job.run(range(ENOUGH, ENOUGH + 3))
    torch.testing.assert_close(weights(job.mine), weights(job.plain), rtol=0, atol=1e-3)
    assert not torch.equal(weights(job.mine), weights(job.plain)), "sums in half precision are rounded"
    before = job.compression.stats().bytes_sent
    job.follow_plain()
    job.run(range(ENOUGH + 3, ENOUGH + 5), scale=1e12)
    torch.testing.assert_close(weights(job.mine), weights(job.plain), rtol=0, atol=1e-6)
    assert job.compression.stats().bytes_sent > before
    assert_ranks_equal(weights(job.mine))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("fastest", [NONE, FP16, QSGD, TOPK])
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.001}])
def test_unused_layers(clock: Clock, fastest: int, options: dict[str, Any]) -> None:
    clock.fastest = fastest
    with torch.random.fork_rng():
        torch.manual_seed(0)
        job = Training(clock, Unused, find_unused_parameters=True, **options)
    for step in range(ENOUGH + 10):
        job.run(range(step, step + 1))
        assert job.registered.used == set(), "what this step has used is not what the next one uses"
    assert race_of(job.compression).choice == fastest
    assert_ranks_equal(weights(job.mine))
    assert torch.isfinite(weights(job.mine)).all()


@pytest.mark.usefixtures("process_group")
def test_a_gradient_that_is_not_finite_is_seen_by_all(clock: Clock) -> None:
    """As without compression, while no compression or 16 bits are chosen; afterwards training goes on."""
    for fastest in (NONE, FP16):
        clock.fastest = fastest
        job = Training(clock)
        job.run(range(ENOUGH))
        (float("nan") * loss_of(job.mine, 0)).backward() if hvd.rank() == 0 else loss_of(job.mine, 0).backward()  # type: ignore[no-untyped-call]
        assert all(not torch.isfinite(p.grad).all() for p in job.mine.parameters() if p.grad is not None)
        job.optimizers[0].zero_grad()
        job.run(range(ENOUGH, ENOUGH + 2))
        assert torch.isfinite(weights(job.mine)).all()
        assert_ranks_equal(weights(job.mine))


@pytest.mark.usefixtures("process_group")
def test_by_the_real_clock_ranks_stay_equal() -> None:
    compression = Compression.parse("auto:probe=30", merge=2)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compression.register(model, optimizer=optimizer)
    for step in range(60):
        loss_of(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert_ranks_equal(weights(model))
    race = race_of(compression)
    assert race.adam and isinstance(race.asks, Trial) and race.comparisons[0].steps <= 30


@pytest.mark.parametrize("fastest", [NONE, FP16, QSGD, TOPK])
def test_an_optimizer_of_horovod(clock: Clock, fastest: int) -> None:
    clock.fastest = fastest
    compression = hvd_compress.torch.Compression.auto(candidates=CANDIDATES, merge=2)
    clock.compression = compression
    job = Job(compression).run(ENOUGH)
    runners = race_of(compression).comparisons[0].runners
    assert race_of(compression).choice == fastest and not race_of(compression).adam, runners
    assert_ranks_equal(job.weights)


def horovods(clock: Clock, fastest: int, **options: Any) -> tuple[Job, Job]:
    """Return a job that has chosen a candidate, and one without compression that goes on from there."""
    clock.fastest = fastest
    clock.compression = hvd_compress.torch.Compression.auto(candidates=CANDIDATES, merge=2)
    mine, plain = Job(clock.compression, **options).run(ENOUGH), Job(hvd.Compression.none, **options)
    assert race_of(clock.compression).choice == fastest
    assert_ranks_equal(mine.weights)
    plain.model.load_state_dict(mine.model.state_dict())
    plain.optimizer.load_state_dict(copy.deepcopy(mine.optimizer.state_dict()))
    return mine, plain


USES = pytest.mark.parametrize(
    "options",
    [{}, {"backward_passes_per_step": 2}, {"num_groups": 2}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}],
)


@USES
def test_without_compression_it_is_plain_horovod(clock: Clock, options: dict[str, Any]) -> None:
    mine, plain = horovods(clock, NONE, **options)
    before = mine.compression.stats()
    assert torch.equal(mine.run(range(50, 70)).weights, plain.run(range(50, 70)).weights)
    after, nbytes = mine.compression.stats(), sum(p.nbytes for p in mine.model.parameters())
    assert after.steps - before.steps == 20
    assert after.bytes_sent - before.bytes_sent == after.gradient_bytes - before.gradient_bytes == 20 * nbytes


@USES
def test_no_sum_of_horovod_overflows_in_half_precision(clock: Clock, options: dict[str, Any]) -> None:
    """Gradients a million times as large as float16 can hold are summed as without compression."""
    mine, plain = horovods(clock, FP16, **options)
    for job in (mine, plain):
        job.run(range(50, 52))
    torch.testing.assert_close(mine.weights, plain.weights, rtol=0, atol=1e-3)
    assert not torch.equal(mine.weights, plain.weights), "sums in half precision are rounded"
    plain.model.load_state_dict(mine.model.state_dict())
    plain.optimizer.load_state_dict(copy.deepcopy(mine.optimizer.state_dict()))
    for job in (mine, plain):
        for step in range(52, 54):
            job.backward(step, lambda model, x, y: 1e12 * nn.functional.cross_entropy(model(x), y))
            job.optimizer.synchronize()
            for parameter in job.model.parameters():
                assert parameter.grad is not None
                parameter.grad /= 1e12
            with job.optimizer.skip_synchronize():
                job.optimizer.step()
            job.optimizer.zero_grad()
    torch.testing.assert_close(mine.weights, plain.weights, rtol=0, atol=1e-6)
    assert_ranks_equal(mine.weights)


@pytest.mark.parametrize("fastest", [NONE, FP16, TOPK])
def test_layers_that_a_step_of_horovod_does_not_use(clock: Clock, fastest: int) -> None:
    clock.fastest = fastest
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Unused()
    clock.compression = hvd_compress.torch.Compression.auto(candidates=CANDIDATES, merge=2)
    job = Job(clock.compression, model).run(ENOUGH + 10)
    assert race_of(clock.compression).choice == fastest
    assert_ranks_equal(job.weights)
    assert job.weights.isfinite().all()


@pytest.mark.parametrize("fastest", [NONE, FP16])
def test_a_gradient_of_horovod_that_is_not_finite_is_seen_by_all(clock: Clock, fastest: int) -> None:
    """Afterwards training goes on."""
    mine, _ = horovods(clock, fastest)
    factor = torch.inf if hvd.rank() == 0 else 1.0
    mine.backward(50, lambda model, x, y: factor * nn.functional.cross_entropy(model(x), y))
    mine.optimizer.synchronize()
    for parameter in mine.model.parameters():
        assert parameter.grad is not None and not parameter.grad.isfinite().all()
        parameter.grad.zero_()
    with mine.optimizer.skip_synchronize():
        mine.optimizer.step()
    mine.optimizer.zero_grad()
    assert mine.run(range(51, 56)).weights.isfinite().all()
    assert_ranks_equal(mine.weights)


def test_direct_calls_of_horovod_are_refused() -> None:
    compression = hvd_compress.torch.Compression.parse("auto")
    with pytest.raises(UnsupportedError, match=r"auto is not supported in direct calls of hvd\.allreduce"):
        hvd.allreduce(torch.ones(2000), name="one", compression=compression)


@pytest.mark.usefixtures("process_group")
def test_direct_calls_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"auto is not supported in compression\.all_reduce"):
        Compression.parse("auto").all_reduce(torch.ones(2000), name="one")
