"""A job that is killed while it saves goes on from the last complete save, the same on all ranks."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from engine.ranks import Compression, Job, assert_ranks_equal, everyone, leaves_of, rank, size

from hvd_compress.errors import DisagreementError, StateError

pytestmark = pytest.mark.usefixtures("on_ranks")

SPEC = "randomk:ratio=0.1"
"""Ranks that go on from different steps draw different entries, so their weights drift apart."""


def is_last() -> bool:
    """Whether this is the last rank."""
    return rank() == size() - 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that all ranks share."""
    return tmp_path


def of(job: Job) -> Job:
    """A new job with the weights of an old one."""
    new = Job(SPEC)
    new.model.load_state_dict(job.model.state_dict())
    new.optimizer.load_state_dict(deepcopy(job.optimizer.state_dict()))
    return new


def broken_off(folder: Path, steps: int = 2) -> Job:
    """A job that has saved, and whose first rank alone has saved again two steps later: the others were killed."""
    job = Job(SPEC).run(steps)
    job.compression.save(folder)
    kept = of(job)
    job.run(range(steps, steps + 2))
    if rank() == 0:
        job.compression.save(folder)
    everyone("saved")
    return kept


def test_a_save_that_was_broken_off_is_skipped(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = Job(SPEC).run(6)
    job = broken_off(folder)
    job.compression.load(folder)
    assert "skipped save 2" in caplog.text and "resuming from save 1" in caplog.text
    job.run(range(2, 6))
    assert_ranks_equal(job.weights)
    assert torch.equal(job.weights, whole.weights)


def test_a_job_that_comes_to_the_same_step_again_does_not_mix_its_files_with_older_ones(folder: Path) -> None:
    """Rank 0 has saved step 4 twice, in two jobs; the last rank once, in the second one, and then not at all."""
    job = broken_off(folder)
    job.compression.load(folder)
    job.run(range(10, 12))
    if is_last():
        job.compression.save(folder)
    everyone("saved")
    third = of(job)
    third.compression.load(folder)
    assert [session["steps"] for session in third.compression.state_dict()["sessions"].values()] == [2]
    everyone("loaded")  # before the save is completed
    if not is_last():
        job.compression.save(folder)
    everyone("saved")
    third.compression.load(folder)
    assert [session["steps"] for session in third.compression.state_dict()["sessions"].values()] == [4]
    third.run(range(12, 14))
    assert torch.equal(third.weights, job.run(range(12, 14)).weights)
    assert_ranks_equal(third.weights)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("other", ["an older one", "none"])
def test_ranks_that_have_not_loaded_the_same_are_refused(folder: Path, other: str, late: bool) -> None:
    """Before they exchange anything, in the same words; whether they load before their first step or after it."""
    older = Job(SPEC).run(2)
    older.compression.save(folder / "older")
    older.run(range(2, 3)).compression.save(folder / "newer")
    everyone("saved")
    job = of(older)
    if late:
        job.run(1)
    if not is_last() or other != "none":
        job.compression.load(folder / ("older" if is_last() else "newer"))
    with pytest.raises(DisagreementError, match="disagree on the restored state: rank 0 has") as error:
        job.run(range(3, 4))
    assert len(set(everyone(str(error.value)))) == 1


def test_disks_of_their_own_are_refused_with_the_cure(folder: Path) -> None:
    Job(SPEC).run(1).compression.save(folder / str(rank()))
    everyone("saved")
    with pytest.raises(
        StateError, match=r"ranks are missing .*into one shared folder \(or copy the files of all hosts"
    ):
        Compression.parse(SPEC).load(folder / str(rank()))


def test_old_saves_are_removed_once_a_newer_one_is_complete(folder: Path) -> None:
    job = Job(SPEC)
    for step in range(5):
        job.run(range(step, step + 1)).compression.save(folder)
        everyone("saved")
    assert sorted({path.name.split("-")[1] for path in folder.iterdir()}) == ["000004", "000005"]
    again = of(job)
    again.compression.load(folder)
    before = leaves_of(job.compression)
    assert all(torch.equal(leaf, before[name]) for name, leaf in leaves_of(again.compression).items())
