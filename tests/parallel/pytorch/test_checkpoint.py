"""Checkpoints of `torch.distributed`: the same ranks go on bit for bit, others with the sum of the residuals."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch
import torch.distributed as dist
from parallel.pytorch.ddp_training import group_of, loss_of, weights
from parallel.pytorch.race_clock import CANDIDATES, ENOUGH, TOPK, Clock
from parallel.pytorch.test_local_steps import NESTEROV, Training
from parallel.pytorch.training import SIZE, make_model
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.distributed import Compression, FullState
from hvd_compress.errors import StateError


class Job:
    """A training with DDP; its steps are timed by a clock, if any."""

    def __init__(self, spec: str, clock: Clock | None = None) -> None:
        self.model = DistributedDataParallel(make_model())
        made = Compression.auto(candidates=CANDIDATES, merge=2) if spec == "auto" else Compression.parse(spec, merge=2)
        self.compression = made.register(self.model)
        self._clock = clock
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def run(self, steps: range) -> Job:
        """Train."""
        if self._clock is not None:
            self._clock.compression = self.compression
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.model, step).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return self

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "compression": FullState(self.compression)}

    def save_while_training(self, folder: Path, steps: range) -> None:
        """Save everything, while the training goes on."""
        saving = state_dict_saver.async_save(self._state(), checkpoint_id=folder, process_group=dist.new_group())
        self.run(steps)
        assert isinstance(saving, Future)
        saving.result()

    def save(self, folder: Path) -> None:
        """Save everything."""
        state_dict_saver.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> Job:
        """Load everything."""
        state = self._state()
        state_dict_loader.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return self

    def assert_ranks_equal(self) -> None:
        """All ranks of the process group hold the same bits."""
        mine = weights(self.model)
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
        assert all(torch.equal(one, mine) for one in found)

    def residuals(self) -> Tensor:
        """Return the sum of the residuals of all ranks."""
        (session,) = self.compression.state_dict()["sessions"].values()
        residual = torch.cat([leaves["residual"] for leaves in session["buckets"].values() if "residual" in leaves])
        dist.all_reduce(residual := residual.double())
        return residual


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of all ranks."""
    return Path(hvd.broadcast_object(str(tmp_path)))


@pytest.mark.parametrize("spec", ["topk:ratio=0.01", "powersgd:rank=2", "auto"])
def test_a_job_goes_on_from_its_checkpoint(spec: str, folder: Path, clock: Clock) -> None:
    """Bit for bit; then with one rank, with one more each time, and with all again, with the sum of the residuals."""
    clock.fastest = TOPK
    half = ENOUGH + 30 if spec == "auto" else 6
    with group_of(SIZE, f"{folder}/all"):
        job = Job(spec, clock).run(range(half))
        residuals = job.residuals()
        job.save_while_training(folder / "0", range(half, half + 3))
        job.run(range(half + 3, half + 6))
        loaded = Job(spec, clock).load(folder / "0").run(range(half, half + 6))
        assert torch.equal(weights(loaded.model), weights(job.model))
    for ranks in range(1, SIZE + 1):
        if hvd.rank() < ranks:
            with group_of(ranks, f"{folder}/first{ranks}"):
                loaded = Job(spec, clock).run(range(1)).load(folder / str(ranks - 1))
                torch.testing.assert_close(loaded.residuals(), residuals)
                loaded.run(range(half, half + 6)).assert_ranks_equal()
                residuals = loaded.residuals()
                loaded.save(folder / str(ranks))
                for race in loaded.compression.races().values():
                    assert race.choice == TOPK and race.comparisons == []
        residuals = hvd.broadcast_object(residuals)


@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.1,min_size=0"])
def test_local_steps_go_on_on_other_numbers_of_ranks(spec: str, folder: Path) -> None:
    """With the global model and its momentum, and the sum of the residuals."""
    options: dict[str, Any] = {"every": 2, "compression": spec, "outer": NESTEROV}

    def facts(job: Training) -> tuple[list[Tensor], Tensor]:
        sessions = dict(job.local.state_dict()["sessions"])
        whole = list(sessions.pop("local_steps")["buckets"][""].values())
        kept = [leaf for one in sessions.values() for leaves in one["buckets"].values() for leaf in leaves.values()]
        residual = torch.cat([torch.zeros(1), *(leaf for leaf in kept if isinstance(leaf, Tensor))])
        dist.all_reduce(residual)
        return whole, residual

    with group_of(SIZE, f"{folder}/all"):
        job = Training(**options).run(4)
        job.local.save(folder / "0")
        model, (whole, residual) = job.model.state_dict(), facts(job)
    for ranks in range(1, SIZE + 1):
        if hvd.rank() < ranks:
            with group_of(ranks, f"{folder}/first{ranks}"):
                job = Training(**options).run(2)
                job.local.load(folder / str(ranks - 1))
                job.model.load_state_dict(model)
                now, left = facts(job)
                assert all(torch.equal(a, b) for a, b in zip(now, whole, strict=True))
                torch.testing.assert_close(left, residual)
                mine = job.run(2).weights
                found = [torch.empty_like(mine) for _ in range(ranks)]
                dist.all_gather(found, mine)
                assert all(torch.equal(one, mine) for one in found)
                job.local.save(folder / str(ranks))
                model, (whole, residual) = job.model.state_dict(), facts(job)
        model, whole, residual = hvd.broadcast_object((model, whole, residual))


@pytest.mark.usefixtures("process_group")
def test_a_checkpoint_of_one_rank_is_refused_by_the_others(folder: Path) -> None:
    """It is of the compressor itself: the state of some rank, if any."""
    job = Job("topk:ratio=0.01").run(range(2))
    state_dict_saver.save({"compression": job.compression}, checkpoint_id=folder)
    said = ""
    try:
        state_dict_loader.load({"compression": Job("topk:ratio=0.01").compression}, checkpoint_id=folder)
    except StateError as error:
        said = str(error)
    refusals = [one for one in hvd.allgather_object(said) if one]
    assert len(refusals) == SIZE - 1
    assert all("cannot be loaded on rank" in one and "FullState(compression)" in one for one in refusals)


@pytest.mark.usefixtures("process_group")
def test_a_checkpoint_from_before_compression_begins_at_zero(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    state_dict_saver.save({"model": model.state_dict()}, checkpoint_id=folder)
    job = Job("topk:ratio=0.01")
    state = {"model": model.state_dict(), "compression": FullState(job.compression)}
    state_dict_loader.load(state, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert "the checkpoint has no state of this compression: residuals begin at zero" in caplog.text
    job.run(range(1))
