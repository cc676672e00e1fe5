"""``auto`` in training: ranks change together, nothing is lost on the way, and a saved job goes on."""

from __future__ import annotations

import logging
import pickle
import threading
from pathlib import Path

import pytest
import torch
from engine.ranks import Compression, Job, assert_ranks_equal, everyone, rank, restart, transport
from engine.test_merging import Balance, residual
from torch import Tensor, nn

from hvd_compress.engine import autotune
from hvd_compress.engine.candidates import between_nodes
from hvd_compress.engine.race import Race, Stage
from hvd_compress.engine.spec import parse
from hvd_compress.errors import SpecError, UnsupportedError
from hvd_compress.torch.compressor import ReducingCompressor

pytestmark = [pytest.mark.usefixtures("on_ranks"), pytest.mark.matched("names")]

CANDIDATES = [
    "blockk:ratio=0.1,min_size=0",
    "topk:ratio=0.05,min_size=0",
    "powersgd:rank=2,min_size=0,min_gain=0",
    "efsignsgd:min_size=0",
]
"""All of them keep what they do not send."""

POWERSGD = 4
"""Number of the candidate that is the fastest on the clock below."""

SPEC = str(parse(CANDIDATES[2]))

ENOUGH = 40
"""Steps in which a comparison ends."""


def made(merge: int = 2) -> Job:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)), nn.Linear(32, 10))
    return Job(Compression.auto(candidates=CANDIDATES, merge=merge), model, lr=0.02, momentum=0)


def race_of(job: Job) -> Race:
    assert job.reducer.race is not None
    return job.reducer.race


class Clock(threading.local):
    """In the place of `time`: a step takes as long as its candidate is said to; on other ranks than 0, all the same."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.times = [0.5, 0.4, 0.35, 0.3, 0.1, 0.2]
        self._now, self._steps = 0.0, 0

    def perf_counter(self) -> float:
        """As that of `time`."""
        steps = sum(job.reducer.steps for job in self.jobs)
        if self.jobs and steps != self._steps:
            self._now += self.times[race_of(self.jobs[-1]).choice] if rank() == 0 else 1.0
            self._steps = steps
        return self._now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(autotune, "time", made)
    return made


def train(job: Job, clock: Clock, steps: int, first: int = 0) -> list[int]:
    """Make steps; return the candidates."""
    choices = []
    for step in range(first, first + steps):
        job.run(range(step, step + 1))
        clock.jobs = [job]
        choices.append(race_of(job).choice)
    return choices


def test_nothing_is_lost_while_candidates_take_turns(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hvd_compress")
    job = made()
    balance, choices = Balance(job), []
    for step in range(ENOUGH):
        balance.run(step)
        clock.jobs = [job]
        choices.append(race_of(job).choice)
    balance.check(1e-3)  # sums in half precision are rounded
    assert {0, 1, 2, 3, 4, 5} == set(choices), "each had its steps"
    assert race_of(job).choice == POWERSGD
    assert len(set(map(tuple, everyone(choices)))) == 1
    assert_ranks_equal(job.weights)
    said = [record.getMessage() for record in caplog.records if record.name == "hvd_compress"]
    assert [one for one in said if f"auto chose {SPEC!r}" in one] == said[-1:]
    assert job.compression.stats().chosen == race_of(job).candidates[POWERSGD].spec


@pytest.mark.matched("nodes", "nodes by name", "nodes in turns")
@pytest.mark.parametrize(
    "spec", ["topk:ratio=0.05,min_size=0", "efsignsgd:twoway=on,min_size=0", "powersgd:rank=2,min_size=0"]
)
def test_nothing_is_lost_on_the_way_between_nodes_and_back(spec: str, clock: Clock) -> None:
    """Candidates are close, so that they take turns. Without compression at last, nothing is kept."""
    compression = Compression.auto(candidates=[spec, between_nodes(spec)])
    job = Job(compression, made().model, lr=0.02, momentum=0)
    balance = Balance(job)
    clock.times = [100.0, 120.0, 110.0, 110.0]
    choices = []
    for step in range(ENOUGH):
        balance.run(step)
        clock.jobs = [job]
        choices.append(race_of(job).choice)
    assert {2, 3} <= set(choices) and choices[-1] == 0
    assert len(set(map(tuple, everyone(choices)))) == 1
    balance.check(1e-3)
    assert_ranks_equal(job.weights)
    assert job.compression.stats().bytes_inside > 0


@pytest.mark.matched("nodes", "nodes by name")
def test_a_saved_job_goes_on_between_nodes(clock: Clock) -> None:
    candidates = ["topk:ratio=0.05,min_size=0,hierarchical=on"]
    job = Job(Compression.auto(candidates=candidates), made().model, lr=0.02, momentum=0)
    clock.times = [0.5, 0.4, 0.1]
    train(job, clock, ENOUGH + 30)
    after = Job(Compression.auto(candidates=candidates), made().model, lr=0.02, momentum=0)
    after.compression.load_state_dict(job.compression.state_dict())
    after.model.load_state_dict(job.model.state_dict())
    assert torch.equal(after.run(range(300, 304)).weights, job.run(range(300, 304)).weights)
    assert race_of(after).choice == 2 and race_of(after).comparisons == []


def test_it_follows_when_another_one_becomes_the_fastest(clock: Clock) -> None:
    job = made()
    train(job, clock, ENOUGH)
    clock.times = [0.05, 0.4, 0.35, 0.3, 0.2, 0.2]
    choices = train(job, clock, 120, first=ENOUGH)
    assert choices[0] == POWERSGD and race_of(job).choice == 0
    assert_ranks_equal(job.weights)


def test_a_saved_job_goes_on_with_its_choice(clock: Clock, tmp_path: Path) -> None:
    job = made()
    train(job, clock, ENOUGH + 30)
    job.compression.save(tmp_path)
    everyone("all have saved")
    after, loaded = made(), made()
    after.compression.load_state_dict(job.compression.state_dict())
    loaded.compression.load(tmp_path)
    for other in (after, loaded):
        other.model.load_state_dict(job.model.state_dict())
    job.run(range(300, 304))
    for other in (after, loaded):
        assert torch.equal(other.run(range(300, 304)).weights, job.weights)
        assert race_of(other).choice == POWERSGD and race_of(other).comparisons == []


def kept_by_all(job: Job) -> list[Tensor]:
    """The sums of the ranks' residuals, by parameter."""
    return [torch.stack(everyone(residual(job, p))).sum(0) for p in job.model.parameters()]


@pytest.mark.matched("channels")
def test_other_numbers_of_ranks_go_on_with_the_choice(clock: Clock, tmp_path: Path) -> None:
    """Saved by three ranks, then by two of them and by one, and loaded by three again; no residual is lost."""
    job = made()
    train(job, clock, ENOUGH + 30)
    kept = kept_by_all(job)
    job.compression.save(tmp_path / "0")
    for epoch, members in enumerate([[0, 1], [0], [0, 1, 2]], start=1):
        if transport().thread not in members:
            continue
        restart(members, epoch)
        everyone("those of before have saved")
        job = made()
        job.compression.load(tmp_path / str(epoch - 1))
        balance = Balance(job)
        for total, residuals in zip(balance.put_in.values(), kept, strict=True):
            total += residuals if rank() == 0 else 0
        for step in range(100 * epoch, 100 * epoch + 4):
            balance.run(step)
        balance.check()
        assert race_of(job).choice == POWERSGD and race_of(job).comparisons == []
        assert_ranks_equal(job.weights)
        kept = kept_by_all(job)
        assert max(float(total.abs().max()) for total in kept) > 1e-3
        job.compression.save(tmp_path / str(epoch))


def test_a_rank_may_save_alone_at_any_time(clock: Clock) -> None:
    job = made()
    for step in range(ENOUGH):
        if rank() == step % 2:
            job.compression.state_dict()
        everyone("the others wait for it")
        train(job, clock, 1, first=step)
    assert race_of(job).choice == POWERSGD


def test_a_job_saved_during_the_comparison_begins_it_again(clock: Clock) -> None:
    job = made()
    train(job, clock, 10)
    after = made()
    after.compression.load_state_dict(job.compression.state_dict())
    after.model.load_state_dict(job.model.state_dict())
    train(after, clock, ENOUGH)
    assert race_of(after).choice == POWERSGD
    assert_ranks_equal(after.weights)


def test_another_optimizer_of_the_same_parameters_goes_on_with_the_choice(clock: Clock) -> None:
    job = made()
    train(job, clock, ENOUGH + 30)
    job.optimizer.close()
    clock.jobs = []
    again = Job(job.compression, job.model, lr=0.02, momentum=0)
    again.run(range(300, 303))
    assert race_of(again).choice == POWERSGD and race_of(again).comparisons == []


def test_a_step_that_is_not_finite_counts_for_nothing(clock: Clock) -> None:
    """A survey needs finite gradients; so do all steps whose state is kept."""
    job = made()
    bad = next(job.model.parameters())
    hook = bad.register_hook(lambda grad: grad * float("nan"))  # type: ignore[no-untyped-call]
    job.run(range(2))
    assert race_of(job).asks is Stage.SURVEY and not torch.isfinite(bad).all()
    hook.remove()
    job.model.load_state_dict(made().model.state_dict())
    job.optimizer.zero_grad()
    train(job, clock, ENOUGH)
    assert race_of(job).choice == POWERSGD


@pytest.mark.parametrize("name", ["auto.md", "auto.html"])
def test_the_report_says_what_was_tried(name: str, clock: Clock, tmp_path: Path) -> None:
    job = made()
    file = tmp_path / f"{rank()}-{name}"
    job.run(range(1))
    job.compression.report(file)
    assert "Nothing yet" in file.read_text()
    train(job, clock, ENOUGH, first=1)
    job.compression.report(file)
    text = file.read_text()
    for spec in ("none", "fp16:feedback=on", *CANDIDATES[:2]):
        assert spec in text
    assert f"chose {SPEC}, whose steps took" in text and "The comparison cost" in text


def test_a_report_needs_auto_and_a_name_that_it_knows(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"must end with \.md or \.html"):
        Compression.parse("auto").report(tmp_path / "auto.txt")
    with pytest.raises(UnsupportedError, match="qsgd is the same in each step"):
        Compression.parse("qsgd").report(tmp_path / "auto.md")


def test_it_is_not_a_part_of_other_choices() -> None:
    with pytest.raises(UnsupportedError, match="auto is not supported with merge='search'"):
        Compression.parse("auto", merge="search")
    with pytest.raises(UnsupportedError, match="auto is not supported within by_name"):
        Compression.by_name({"*": "auto"})
    with pytest.raises(UnsupportedError, match="auto is not supported within phases"):
        Compression.phases({0: "none", 10: "auto"})


def test_compressors_are_pickled_as_they_are_written() -> None:
    for made in (Compression.parse("auto:loss=small"), Compression.auto(candidates=CANDIDATES)):
        again = pickle.loads(pickle.dumps(made))
        assert isinstance(again, ReducingCompressor) and again.method == made.method
