"""Local steps of ranks that are late, or gone: a quorum goes on without them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launching import torchrun
from torch._C._distributed_c10d import HashStore

from hvd_compress.distributed.quorum import Meetings
from hvd_compress.local.stepper import Meeting, Stage

RANK = Path(__file__).with_name("quorum_rank.py")


def told(folder: Path, ranks: int, *arguments: str) -> list[str]:
    """Return what each rank has written."""
    torchrun(ranks, RANK, folder, *arguments)
    return [path.read_text() if (path := folder / str(rank)).exists() else "" for rank in range(ranks)]


def met(*comings: tuple[Stage, int], quorum: int = 3) -> list[Sequence[Meeting]]:
    """Return the meetings of ranks with a stage and a number of steps each; those that end close then, too."""
    store = HashStore()

    def meet(rank: int) -> Sequence[Meeting]:
        stage, step = comings[rank]
        meetings = Meetings(store, rank, len(comings), quorum, patience=0.0, limit=30.0)
        first = meetings.meet(stage, step)
        return [first, meetings.meet(Stage.CLOSE, step)] if stage is Stage.END else [first]

    with ThreadPoolExecutor(len(comings)) as pool:
        return list(pool.map(meet, range(len(comings))))


def test_all_meet() -> None:
    assert met(*[(Stage.STEP, 4)] * 3) == [[Meeting([0, 1, 2], [])]] * 3


def test_those_that_end_go_before_others() -> None:
    """Those that have gone on without them get their model when they close."""
    closed = Meeting([1], [0, 2])
    found = met((Stage.STEP, 16), (Stage.END, 12), (Stage.STEP, 16))
    assert found == [[closed], [Meeting([1], []), closed], [closed]]


def test_those_with_fewer_steps_go_before_others() -> None:
    later = Meeting([0, 2], [1])
    assert met((Stage.STEP, 8), (Stage.STEP, 9), (Stage.STEP, 8)) == [[later]] * 3


@pytest.mark.jobs
@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.long)])
def test_jobs_with_late_ranks(size: int, tmp_path: Path) -> None:
    """All ranks end with the same model, as a job of one process makes it from who has averaged with whom."""
    jobs = 100 if size == 4 else 20
    missed = told(tmp_path, size, str(jobs))
    assert sum(map(int, missed)) >= jobs // 4, "hardly a rank was late, so the jobs show nothing"


@pytest.mark.jobs
def test_a_rank_is_gone(tmp_path: Path) -> None:
    """It ends between two averages; the others end with the same model."""
    first, second, gone = told(tmp_path, 3, "gone")
    assert first == second != "" and gone == ""


@pytest.mark.jobs
def test_there_is_no_quorum(tmp_path: Path) -> None:
    for message in told(tmp_path, 3, "alone")[:2]:
        assert "only the ranks [0, 1] have come" in message and "quorum=3" in message
