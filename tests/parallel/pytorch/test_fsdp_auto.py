"""``auto`` with FSDP2: ranks change together, nothing is lost on the way, and a saved job goes on."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from parallel.pytorch.race_clock import ENOUGH, FP16, NONE, QSGD, TOPK, Clock, race_of
from parallel.pytorch.test_fsdp import (
    FEEDBACK,
    ONE_BIT,
    USES,
    Branches,
    Chunked,
    Job,
    as_one,
    each_layer,
    in_half_precision,
    leaves_of,
    mesh,
    two_layers_together,
)
from parallel.pytorch.training import SIZE, assert_ranks_equal, everyone
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hvd_compress.distributed import Compression, DistributedCompressor
from hvd_compress.engine.race import Stage, Trial
from hvd_compress.engine.spec import parse

pytestmark = pytest.mark.usefixtures("process_group")

CANDIDATES = [FEEDBACK, "topk:ratio=0.1,min_size=0"]
SPEC = str(parse(FEEDBACK))


def made(clock: Clock, candidates: list[str] = CANDIDATES) -> DistributedCompressor:
    """Return a compression whose steps the clock times."""
    clock.compression = Compression.auto(candidates=candidates)
    return clock.compression  # type: ignore[no-any-return]


def replicated(model: nn.Sequential) -> None:
    """Each rank is a node of its own, with all shards."""
    meshes = init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("replicate", "shard"))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=meshes)
    fully_shard(model, mesh=meshes)


def reduced_in_bfloat16(model: nn.Sequential) -> None:
    each_layer(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


class OneOfTwo(nn.Module):
    """A model of which each step uses one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 10), nn.Linear(32, 64)])
        for layer in self.layers:
            fully_shard(layer, mesh=mesh())
        fully_shard(self, mesh=mesh())

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.layers[number](x)  # type: ignore[no-any-return]


def choices(job: Job, steps: int, first: int = 0) -> list[int]:
    """Make steps; return their candidates."""
    found = []
    for step in range(first, first + steps):
        job.run(range(step, step + 1))
        found.append(race_of(job.compression).choice)
    return found


def follow(job: Job, other: Job) -> None:
    """Continue with the weights and the momentum of another job."""
    job.model.load_state_dict(other.model.state_dict())
    job.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))


@pytest.mark.parametrize(
    ("fastest", "shard"),
    [
        (-1, each_layer),
        (NONE, as_one),
        (FP16, each_layer),
        (QSGD, each_layer),
        (QSGD, two_layers_together),
        (QSGD, in_half_precision),
        (QSGD, replicated),
        (TOPK, replicated),
    ],
)
def test_the_fastest_is_chosen(clock: Clock, fastest: int, shard: Callable[[nn.Sequential], None]) -> None:
    clock.fastest = fastest
    job = Job(made(clock), shard)
    steps = ENOUGH if fastest >= 0 else 70  # of which 60 compare
    found = choices(job, steps)
    assert len(set(map(tuple, everyone(found)))) == 1, "all ranks change together"
    assert found[-1] == max(fastest, NONE), "without a faster one, it is no compression"
    assert set(found) == ({NONE, FP16, QSGD, TOPK} if shard is replicated else {NONE, FP16, QSGD})
    runners = race_of(job.compression).comparisons[0].runners
    assert (runners[TOPK].verdict == "it cannot compress these gradients") is (shard is not replicated)
    before = job.compression.stats()  # type: ignore[union-attr]
    after = job.run(range(steps, steps + 1)).compression.stats()  # type: ignore[union-attr]
    ratio = (after.gradient_bytes - before.gradient_bytes) / (after.bytes_sent - before.bytes_sent)
    least, most = {FP16: (2, 2), QSGD: (3.5, 4), TOPK: (6, 7)}.get(fastest, (1, 1))
    assert least <= ratio <= most, "the chosen one is in use"
    if shard is replicated:
        assert_ranks_equal(torch.cat([p.to_local().flatten() for p in job.model.parameters()]).detach())


@pytest.mark.parametrize("shard", [each_layer, as_one, in_half_precision, reduced_in_bfloat16])
def test_without_compression_it_is_plain_fsdp(clock: Clock, shard: Callable[[nn.Sequential], None]) -> None:
    """From the step after it has chosen no compression, results are equal bit for bit."""
    plain, ours = Job(None, shard), Job(made(clock), shard).run(range(ENOUGH))
    assert race_of(ours.compression).choice == NONE
    follow(plain, ours)
    steps = range(ENOUGH, ENOUGH + 5)
    atol = 0.0 if SIZE == 2 else 1e-6  # the order of a sum
    before = ours.compression.stats()  # type: ignore[union-attr]
    torch.testing.assert_close(ours.run(steps).weights(), plain.run(steps).weights(), rtol=0, atol=atol)
    after = ours.compression.stats()  # type: ignore[union-attr]
    assert after.bytes_sent - before.bytes_sent == after.gradient_bytes - before.gradient_bytes


@pytest.mark.parametrize(("apart", "fastest"), [(False, 3), (True, 3), (False, NONE)])
def test_nothing_is_lost_while_candidates_take_turns(clock: Clock, apart: bool, fastest: int) -> None:
    """The sum of all gradients is what was delivered and what is still to be sent, whatever parameters a step uses."""
    clock.fastest = fastest
    plain, ours = Branches(None, apart), Branches(None, apart)
    compression = made(clock, [FEEDBACK, ONE_BIT]).register(ours)
    given = delivered = 0.0
    turns = set()
    for number, used in enumerate(USES * 6):
        given += sum(float(grad.double().sum()) for grad in plain.step(number, used) if grad is not None)
        delivered += sum(float(grad.double().sum()) for grad in ours.step(number, used) if grad is not None)
        turns.add(race_of(compression).choice)
        residuals = sum(float(leaf.double().sum()) for _, leaf in leaves_of(compression.state_dict()))
        assert delivered + sum(everyone(residuals)) / SIZE == pytest.approx(given, rel=1e-4, abs=1e-4)
    assert turns == {0, 1, 2, 3} and race_of(compression).choice == fastest
    if fastest == NONE:
        assert not any(leaf.any() for _, leaf in leaves_of(compression.state_dict())), "all has been sent"


def test_a_saved_job_goes_on_with_its_choice(clock: Clock, tmp_path: Path) -> None:
    clock.fastest = QSGD
    job = Job(made(clock)).run(range(ENOUGH + 30))
    folder = everyone(str(tmp_path))[0]
    assert job.compression is not None
    job.compression.save(folder)
    everyone("all have saved")
    early, late = (Job(Compression.auto(candidates=CANDIDATES)) for _ in range(2))
    for other in (early, late):
        follow(other, job)
    early.compression.load(folder)  # type: ignore[union-attr]
    late.compression.load_state_dict(job.compression.state_dict())  # type: ignore[union-attr]
    steps = range(ENOUGH + 30, ENOUGH + 34)
    job.run(steps)
    for other in (early, late):
        assert torch.equal(other.run(steps).weights(), job.weights())
        assert race_of(other.compression).choice == QSGD and race_of(other.compression).comparisons == []


def test_steps_that_do_not_count(clock: Clock) -> None:
    """Ranks stay together over gradients that are not finite on one of them, and over steps that are discarded."""
    clock.fastest = QSGD
    job, found = Job(made(clock)), []
    assert job.compression is not None
    comparing = 0
    for step in range(ENOUGH + 20):
        spoilt = step % 5 == 0 and hvd.rank() == SIZE - 1
        job.backward(step, factor=float("nan") if spoilt else 1.0)
        if step == 0:
            assert race_of(job.compression).asks is Stage.SURVEY
        if step % 5 == 3:
            job.compression.discard()
        elif step % 5:
            job.optimizer.step()
        job.optimizer.zero_grad()
        found.append(race_of(job.compression).choice)
        comparing += race_of(job.compression).compares
    assert len(set(map(tuple, everyone(found)))) == 1
    assert found[-1] == QSGD and comparing == 20, "12 of them count: three in five steps"
    assert job.weights().isfinite().all()
    comparison = race_of(job.compression).comparisons[0]
    assert [set(one.times) for one in comparison.runners if one.times] == [{2.0}, {2.0}, {1.0}]


def test_a_survey_waits_for_finite_gradients(clock: Clock) -> None:
    job = Job(made(clock))
    for step in range(3):
        job.backward(step, factor=float("nan"))
        job.optimizer.zero_grad()
    assert race_of(job.compression).asks is Stage.SURVEY
    job.run(range(3, 5))
    assert isinstance(race_of(job.compression).asks, Trial)


def test_a_group_that_the_survey_has_not_seen(clock: Clock) -> None:
    """A candidate that it could not use is not taken; the others take as long as each other."""
    clock.fastest = TOPK
    model = OneOfTwo()
    compression = made(clock, ["qsgd:bits=8", "topk:ratio=0.1"]).register(model)
    for step in range(70):  # of which up to 60 compare
        model(torch.ones(4, 32), step % 2).sum().backward()
    race = race_of(compression)
    assert race.choice == NONE and race.comparisons[0].runners[TOPK].verdict == "it cannot compress these gradients"


def test_a_loss_in_chunks_and_accumulated_gradients(clock: Clock) -> None:
    """Several reductions, or several backward passes, are one step."""
    clock.fastest = QSGD
    plain, ours = Chunked(), Chunked()
    compression = made(clock).register(ours)
    models: list[Any] = [plain, ours]
    for number in range(ENOUGH):
        for model in models:
            model.set_requires_gradient_sync(False)
            model(torch.ones(4, 32)).sum().backward()
            model.set_requires_gradient_sync(True)
        expected, found = plain.step(number), ours.step(number)
        torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
    assert race_of(compression).choice == QSGD and race_of(compression).steps == ENOUGH - 1


def test_what_it_says(clock: Clock, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO, "hvd_compress")
    clock.fastest = QSGD
    job = Job(made(clock)).run(range(ENOUGH))
    assert job.compression is not None
    said = [record.getMessage() for record in caplog.records if "auto chose" in record.getMessage()]
    assert len(said) == (hvd.rank() == 0) and all(f"Compression.parse({SPEC!r})" in one for one in said)
    assert job.compression.stats().chosen == SPEC
    job.compression.report(tmp_path / "auto.md")
    assert "it cannot compress these gradients" in (tmp_path / "auto.md").read_text()


def test_registered_again_it_goes_on(clock: Clock) -> None:
    """Also if the optimizer is known only then, and candidates are others: before, between and after the survey."""
    for steps in (0, 1, 2):
        clock.compression = compression = Compression.auto()
        job = Job(compression)
        job.run(range(steps))
        assert all(race.adam for race in compression.races().values())
        compression.register(job.model, optimizer=job.optimizer)
        job.run(range(steps, ENOUGH))
        race = race_of(compression)
        assert not race.adam and race.choice == NONE and race.steps == ENOUGH - 1 and len(race.comparisons) == 1


def test_by_the_real_clock() -> None:
    compression = Compression.parse("auto:probe=30")
    job: Any = Job(compression)
    optimizer = torch.optim.AdamW(job.model.parameters(), lr=1e-3)
    compression.register(job.model, optimizer=optimizer)
    job.optimizer = optimizer
    found = choices(job, 60)
    assert len(set(map(tuple, everyone(found)))) == 1
    race = race_of(compression)
    assert race.adam and isinstance(race.asks, Trial) and race.comparisons[0].steps <= 30
