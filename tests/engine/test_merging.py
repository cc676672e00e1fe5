"""The search for the partition: nothing is lost on the way, and ranks stay equal."""

from __future__ import annotations

import gc
import logging
import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from catalogue import one_in
from engine.ranks import Compression, Job, assert_ranks_equal, everyone, rank, size
from torch import Tensor, nn

from hvd_compress.core.bucketing import Cuts, Merge, pin
from hvd_compress.engine import autotune
from hvd_compress.engine import bucket_autotune as search
from hvd_compress.errors import StateError
from hvd_compress.torch.reducer import Reducer

pytestmark = [pytest.mark.usefixtures("on_ranks"), pytest.mark.matched("names")]

TOPK, POWERSGD = "topk:ratio=0.05,min_size=0", "powersgd:rank=2,min_size=0,min_gain=0"

ENOUGH = 26
"""Steps that a search takes, on the clock below."""


def made(spec: str, merge: Merge = "search") -> Job:
    """A job whose model has five matrices, which are compressed, and as many vectors, which are not."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)), nn.Linear(32, 10))
    return Job(Compression.parse(spec, merge=merge), model, lr=0.02, momentum=0)


def reducer_of(job: Job) -> Reducer:
    return job.reducer


def cuts_of(job: Job) -> Cuts:
    """The partition of now."""
    merge = reducer_of(job).saved().merge
    return () if merge == 1 else tuple(map(int, str(merge).removeprefix("at:").split(",")))


class Clock(threading.local):
    """In the place of `time`: steps take as long as their partition is said to.

    The best of all has a bucket of one gradient, one of two, and one of the rest. Other ranks than the first have a
    clock on which no partition is better than another.
    """

    def __init__(self) -> None:
        self.job: Job | None = None
        self._now = 0.0

    def perf_counter(self) -> float:
        """As that of `time`."""
        if self.job is not None and rank() == 0:
            cuts = cuts_of(self.job)
            self._now += 2.0 + 0.1 * len(cuts) - 0.5 * (1 in cuts) - 0.5 * (3 in cuts)
        return self._now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Steps on it do not vary, so one of each candidate is enough."""
    made = Clock()
    monkeypatch.setattr(autotune, "time", made)
    monkeypatch.setattr(search, "TIMED", 1)
    return made


def residual(job: Job, p: Tensor) -> Tensor:
    """What is kept back of a parameter."""
    _, bucket, position = reducer_of(job).places[id(p)]
    kept = bucket.read().get("residual")
    return torch.zeros_like(p) if kept is None else torch.tensor(kept[bucket.spans[position]]).view_as(p)


class Balance:
    """What the gradients of all steps have come to, and what was given out: sums over the ranks, by parameter."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.put_in = {p: torch.zeros_like(p) for p in job.model.parameters()}
        self.given = {p: torch.zeros_like(p) for p in job.model.parameters()}
        for p in job.model.parameters():
            p.register_hook(partial(self._note, self.put_in[p]))  # type: ignore[no-untyped-call]

    @staticmethod
    def _note(total: Tensor, grad: Tensor) -> None:
        total += grad

    def run(self, step: int) -> None:
        """Make a step."""
        self._job.backward(step)
        self._job.optimizer.synchronize()
        for p, total in self.given.items():
            assert p.grad is not None
            self._note(total, p.grad * size())
        with self._job.optimizer.skip_synchronize():
            self._job.optimizer.step()
        self._job.optimizer.zero_grad()

    def check(self, atol: float = 1e-4) -> None:
        """Nothing is lost: what was put in has been given out, or is kept."""
        for name, p in self._job.model.named_parameters():
            put_in, kept = (torch.stack(everyone(t)).sum(0) for t in (self.put_in[p], residual(self._job, p)))
            missing = put_in - kept - self.given[p]
            assert float(missing.abs().max()) < atol, name


def settle(job: Job, clock: Clock, run: Callable[[int], object]) -> list[Cuts]:
    """Train until the search has ended; gives the partition of each step but the first."""
    run(0)
    clock.job = job
    partitions: list[Cuts] = []
    while reducer_of(job).saved().search is not None and len(partitions) < ENOUGH:
        partitions.append(cuts_of(job))
        run(len(partitions))
    clock.job = None
    assert everyone(partitions) == [partitions] * size()
    assert len(partitions) + 1 == ENOUGH
    return partitions


@pytest.mark.parametrize("spec", one_in(2, [TOPK, POWERSGD]))
def test_the_search_loses_nothing(spec: str, clock: Clock, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """It settles, is logged once, and then is as what it has found: pinned, saved and restored, or restored pinned."""
    job = made(spec)
    balance = Balance(job)
    caplog.set_level(logging.INFO, "hvd_compress")
    partitions = settle(job, clock, balance.run)
    balance.check()
    assert_ranks_equal(job.weights)
    assert cuts_of(job) == (1, 3) and len(set(partitions)) > 3
    (said,) = (record.getMessage() for record in caplog.records if record.name == "hvd_compress")
    assert f"chose merge='at:1,3' after {ENOUGH} steps" in said

    job.compression.save(tmp_path)
    everyone("all have saved")
    restored, pinned = made(spec), made(spec, pin(cuts_of(job)))
    restored.compression.load_state_dict(job.compression.state_dict())
    pinned.compression.load(tmp_path)
    for other in (restored, pinned):
        other.model.load_state_dict(job.model.state_dict())
    job.run(range(200, 204))
    for other in (restored, pinned):
        assert torch.equal(other.run(range(200, 204)).weights, job.weights)
        assert cuts_of(other) == (1, 3)
    assert reducer_of(restored).saved().search is None


def test_steps_that_do_not_count(clock: Clock) -> None:
    """Those with a gradient that is not finite, and those that are given up; ranks still change together."""
    job = made(TOPK)

    def run(step: int) -> None:
        if step % 3 == 1:
            job.backward(step, spoilt)
            job.optimizer.synchronize()
            job.optimizer.zero_grad()
            with job.optimizer.skip_synchronize():
                job.optimizer.step()  # of nothing
        if step % 3 == 2:
            job.backward(step)
            job.optimizer.load_state_dict(job.optimizer.state_dict())
            job.optimizer.zero_grad()
        job.run(range(step, step + 1))

    settle(job, clock, run)
    assert cuts_of(job) == (1, 3)
    assert_ranks_equal(job.weights)


def spoilt(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), y)
    return loss * (math.nan if rank() == 1 else 1.0)


def test_a_search_that_was_saved_goes_on(clock: Clock) -> None:
    whole = made(TOPK)
    clock.job = whole.run(1)
    whole.run(range(1, 12))
    second = made(TOPK)
    second.compression.load_state_dict(whole.compression.state_dict())
    second.model.load_state_dict(whole.model.state_dict())
    second.run(range(12, 13))
    assert cuts_of(second) != (3,) and torch.equal(second.weights, whole.run(range(12, 13)).weights)
    tried = [len(reducer_of(job).saved().search or ()) for job in (whole, second)]
    assert tried[0] > 2 and tried[0] - tried[1] in (0, 1)  # it warms up again
    clock.job = second
    second.run(range(13, 40))
    assert cuts_of(second) == (1, 3) and reducer_of(second).saved().search is None


def test_a_new_optimizer_goes_on_with_what_was_found(clock: Clock) -> None:
    first = made(TOPK)
    clock.job = first.run(1)
    model, compression = first.run(range(1, ENOUGH)).model, first.compression
    clock.job = None
    first.optimizer.close()
    del first
    gc.collect()
    second = Job(compression, model, lr=0.02, momentum=0).run(range(ENOUGH, ENOUGH + 1))
    assert (cuts_of(second), reducer_of(second).saved().search) == ((1, 3), None)
    assert_ranks_equal(second.weights)


@pytest.mark.parametrize("merge", [1, "layer", "at:2"])
def test_another_partition_takes_over_what_was_saved(merge: Merge) -> None:
    first, second = made(POWERSGD, 2).run(3), made(POWERSGD, merge)
    second.compression.load_state_dict(first.compression.state_dict())
    second.backward(3)  # the state is taken over, and the step has not ended
    kept = [
        {name: residual(job, p) for name, p in job.model.named_parameters() if p.dim() > 1} for job in (first, second)
    ]
    assert all(everyone(all(torch.equal(kept[1][name], tensor) and tensor.any() for name, tensor in kept[0].items())))
    second.optimizer.step()
    assert reducer_of(second).saved().merge == merge
    assert reducer_of(second).steps == 4


def test_what_no_other_bucket_can_take_over_is_not_searched() -> None:
    """And is refused where the partition is another one; where any will do, it is that which was saved."""
    spec = "onebit:twoway=on,min_size=0"
    job = made(spec, 3).run(2)
    state = job.compression.state_dict()
    same, other = made(spec), made(spec, 2)
    for one in (same, other):
        one.compression.load_state_dict(state)
        one.model.load_state_dict(job.model.state_dict())
    job.run(range(2, 14))
    assert torch.equal(same.run(range(2, 14)).weights, job.weights)
    with pytest.raises(StateError, match="saved with merge=3, but merge is 2 now, and the state of") as error:
        other.run(1)
    assert everyone(str(error.value)) == [str(error.value)] * size()


def test_elastic_jobs_have_two_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was saved: a newcomer would not know of other ones."""
    first = made(TOPK, "at:1").run(2)
    everyone("have saved")
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    second = made(TOPK)
    second.compression.load_state_dict(first.compression.state_dict())
    second.run(range(2, 14))
    assert cuts_of(second) == (3,)
    assert_ranks_equal(second.weights)
