"""Files of states: they come back as they were, and what is damaged is refused with a clear error."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.checkpoint import state_files
from hvd_compress.checkpoint.saving import SaveLoadMixin
from hvd_compress.checkpoint.state_dict import PendingStates, Saved, SavedSession
from hvd_compress.core.collectives import World
from hvd_compress.errors import StateError

LEAVES: dict[str, Any] = {
    "residual": np.arange(6, dtype=np.float32),
    "inner.step": 7,
    "codes": np.array([1, -2], np.int8),
    "achieved": np.float64(0.5),
}


def saved(rank: int = 0, size: int = 2, steps: int = 5, job: int = 7, leaves: dict[str, Any] = LEAVES) -> Saved:
    return Saved("topk", rank, size, {"m": SavedSession(rank, size, steps, {"b0": leaves, "b1": {}}, job=job)})


def save_all(folder: Path, size: int = 2, steps: int = 5, job: int = 7) -> list[Path]:
    return [state_files.save(folder, saved(rank, size, steps, job)) for rank in range(size)]


def loaded(folder: Path, rank: int = 0, size: int = 2) -> list[tuple[int, int, int]]:
    """Rank, steps and job of what a rank gets."""
    got = [session for one in state_files.load(folder, rank, size) for session in one.sessions.values()]
    return [(session.rank, session.steps, session.job) for session in got]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    path = state_files.save(tmp_path / "new" / "folder", saved())
    assert names(path.parent) == ["hvd_compress-000001-00000-of-00002.npz"]
    back = state_files.read(path)
    assert back._replace(sessions={}) == saved()._replace(sessions={})
    session = back.sessions["m"]
    assert session._replace(buckets={}) == SavedSession(0, 2, 5, {}, job=7)
    assert session.buckets["b1"] == {}
    for name, leaf in LEAVES.items():
        np.testing.assert_array_equal(session.buckets["b0"][name], leaf)
        assert session.buckets["b0"][name].dtype == np.asarray(leaf).dtype


def test_the_files_of_all_ranks_are_read_where_the_number_differs(tmp_path: Path) -> None:
    save_all(tmp_path)
    assert [s.rank for s in state_files.load(tmp_path, 1, 2)] == [1]
    assert [s.rank for s in state_files.load(tmp_path, 3, 4)] == [0, 1]


def test_a_folder_without_a_complete_save_is_refused_with_the_cure(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "not there"):
        with pytest.raises(StateError, match=r"holds no saved state that this version can read.*pass the folder that"):
            state_files.load(folder, 0, 2)
    state_files.save(tmp_path, saved(1))
    for rank in range(2):
        with pytest.raises(StateError, match=r"the files of 1 of 2 ranks are missing \(0\).*into one shared folder"):
            state_files.load(tmp_path, rank, 2)
    state_files.save(tmp_path, saved(0, size=3))
    with pytest.raises(StateError, match=r"2 of 3 ranks are missing \(1, 2\); save 1 .* 1 of 2 ranks are missing"):
        state_files.load(tmp_path, 0, 2)


def test_a_save_that_was_broken_off_is_skipped_by_all_ranks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_all(tmp_path, steps=5)
    state_files.save(tmp_path, saved(0, steps=9))
    assert [loaded(tmp_path, rank) for rank in range(2)] == [[(0, 5, 7)], [(1, 5, 7)]]
    assert "skipped save 2 (hvd_compress-000002-*-of-00002.npz): the files of 1 of 2" in caplog.text
    assert caplog.text.count("resuming from save 1") == 2


def test_files_of_different_jobs_never_mix(tmp_path: Path) -> None:
    """Rank 0 was killed after its file; the new job comes to the same step, and other ranks come first."""
    save_all(tmp_path, steps=5)
    state_files.save(tmp_path, saved(0, steps=9))
    state_files.save(tmp_path, saved(1, steps=9, job=8))
    assert loaded(tmp_path) == [(0, 5, 7)]
    state_files.save(tmp_path, saved(0, steps=9, job=8))
    assert [loaded(tmp_path, rank) for rank in range(2)] == [[(0, 9, 8)], [(1, 9, 8)]]


def test_files_that_were_copied_together_are_refused(tmp_path: Path) -> None:
    for part, content in (("a", {"steps": 5}), ("b", {"steps": 9}), ("c", {"job": 8})):
        save_all(tmp_path / part, **content)
    for part, words in (("b", r"different saves \(steps 5, 9\)"), ("c", "different jobs")):
        one = state_files.save(tmp_path / "a", saved(1))
        one.write_bytes((tmp_path / part / one.name).read_bytes())
        for rank, size in ((0, 2), (1, 2), (0, 1), (2, 3)):
            with pytest.raises(StateError, match=words):
                state_files.load(tmp_path / "a", rank, size)
        one.unlink()


def test_ranks_that_had_drifted_apart_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        one = saved(rank)
        session = one.sessions["m"]._replace(shared=rank)
        state_files.save(tmp_path, one._replace(sessions={"m": session}))
    with pytest.raises(StateError, match="the ranks had diverged when they saved it"):
        state_files.load(tmp_path, 0, 2)


def test_only_what_is_out_of_date_is_removed(tmp_path: Path) -> None:
    """The last complete save and other people's files stay; files of more ranks than there are now go, too."""
    others = ["hvd_compress-1-of-2.npz", "model.npz", "hvd_compress-000001-00000-of-00002.npz.bak"]
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    save_all(tmp_path, size=3, steps=1)
    save_all(tmp_path, steps=5)
    state_files.save(tmp_path, saved(0, steps=9))
    assert loaded(tmp_path) == [(0, 5, 7)]
    state_files.save(tmp_path, saved(1, steps=9))
    assert {path.partition("-of-")[0] for path in names(tmp_path) if path not in others} == {
        f"hvd_compress-{save:06}-{rank:05}" for save in (2, 3) for rank in range(2)
    }
    assert all((tmp_path / name).read_bytes() == b"mine" for name in others)


def test_an_incomplete_save_never_replaces_a_complete_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As on disks of their own, or if only rank 0 saves: files pile up, and a warning says why."""
    save_all(tmp_path, steps=1)
    for steps in (5, 9, 13):
        state_files.save(tmp_path, saved(0, steps=steps))
    assert loaded(tmp_path, 1) == [(1, 1, 7)]
    assert "save 3 in" in caplog.text and "all ranks must save at the same steps, into one shared folder" in caplog.text


class Job(SaveLoadMixin):
    """Compressor of a rank whose state is only a step count."""

    def __init__(self, rank: int) -> None:
        self.rank, self.steps = rank, 5

    def _saved(self) -> Saved:
        return saved(self.rank, 3, self.steps)._replace(
            sessions={"m": SavedSession(self.rank, 2, self.steps, {}, job=7, process_set=[0, 1])}
        )


def test_a_rank_that_saves_alone_is_told_at_its_next_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 2 does not train, and the others may come later, but not after a step that they have made together."""
    first, second = Job(0), Job(1)
    for name in ("a", "b"):
        first.save(tmp_path / name)
        first.save(tmp_path / "best")
        for folder in (name, "best"):
            second.save(tmp_path / folder)
        first.steps = second.steps = first.steps + 3
    first.save(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone")
    first.steps += 3
    first.save(tmp_path / "alone")
    assert not caplog.messages
    first.steps += 3
    for name in ("later", "last"):
        first.save(tmp_path / name)
        first.steps += 3
    (told,) = caplog.messages
    assert f"the ranks [1] have not saved to {tmp_path / 'alone'}" in told and "not inside 'if rank == 0:'" in told


def test_saving_twice_is_saving_once(tmp_path: Path) -> None:
    first = save_all(tmp_path)
    assert save_all(tmp_path) == first
    changed = saved(0, leaves={**LEAVES, "residual": np.zeros(6, np.float32)})
    assert state_files.save(tmp_path, changed) not in first, "a complete save is never overwritten"
    assert loaded(tmp_path) == [(0, 5, 7)]


def test_the_save_of_a_step_is_loaded_or_refused(tmp_path: Path) -> None:
    """As of a checkpoint that is not the newest one, beside one folder for all of them."""
    for steps in (5, 9):
        for rank in range(2):
            state_files.save(tmp_path, saved(rank, steps=steps)._replace(step=10 * steps))
    for step, expected in ((None, 9), (90, 9), (50, 5)):
        (one,) = state_files.load(tmp_path, 1, 2, step)
        assert one.sessions["m"].steps == expected
    with pytest.raises(StateError, match=r"and of step 10: .* it is of step 90, not 10; .* it is of step 50, not 10"):
        state_files.load(tmp_path, 1, 2, 10)


@pytest.mark.parametrize("name", ["m", "n"])
def test_two_compressors_need_two_folders(tmp_path: Path, name: str) -> None:
    """Of models with other parameters, or with the same; a later job may go on with the folder of an earlier one."""

    def of_other(steps: int, job: int = 8) -> Saved:
        return Saved("topk", 0, 1, {name: SavedSession(0, 1, steps, {}, job=job)})

    for one in (saved(0, 1), of_other(5), of_other(6), of_other(7, job=9)):
        state_files.save(tmp_path, one)
    state_files.save(tmp_path / "both", saved(0, 1))
    state_files.save(tmp_path / "both", of_other(5))
    with pytest.raises(StateError, match=r"another compressor has saved to .*: use one folder per compressor"):
        state_files.save(tmp_path / "both", saved(0, 1, steps=6))


@pytest.mark.parametrize("name", ["replace", "fsync"])
def test_killed_while_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Before the file is in its place, so that a part is left; in the next save, which removes the part."""
    save_all(tmp_path, steps=5)
    with monkeypatch.context() as patch:
        patch.setattr(os, name, interrupted)
        for rank in range(2):
            with pytest.raises(KeyboardInterrupt):
                state_files.save(tmp_path, saved(rank, steps=9))
    assert len(list(tmp_path.glob("*.partial"))) == 2
    assert loaded(tmp_path, 1) == [(1, 5, 7)]
    save_all(tmp_path, steps=7, job=8)
    assert loaded(tmp_path, 1) == [(1, 7, 8)]
    assert not list(tmp_path.glob("*.partial"))


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_groups_of_ranks_save_together(tmp_path: Path) -> None:
    """Two pairs of ranks that never meet, with numbers of their own."""

    def part(rank: int, steps: int) -> Saved:
        session = SavedSession(
            rank % 2, 2, steps, {}, job=10 + rank // 2, process_set=[rank // 2 * 2, rank // 2 * 2 + 1]
        )
        return Saved("topk", rank, 4, {"m": session})

    for steps in (3, 6):
        for rank in (2, 0, 3, 1):
            state_files.save(tmp_path, part(rank, steps))
    state_files.save(tmp_path, part(1, 9))
    assert [loaded(tmp_path, rank, 4) for rank in range(4)] == [[(rank % 2, 6, 10 + rank // 2)] for rank in range(4)]


def test_ranks_that_do_not_train_need_not_save(tmp_path: Path) -> None:
    """Ranks 1 and 2 of 4 train; an incomplete save is skipped, older ones are removed, another job comes between."""

    def save(rank: int, steps: int, job: int = 7) -> Path:
        session = SavedSession(rank - 1, 2, steps, {}, job=job, process_set=[1, 2])
        return state_files.save(tmp_path, Saved("topk", rank, 4, {"m": session}))

    for steps in (3, 6, 9):
        save(1, steps)
        if steps < 9:
            save(2, steps)
    assert [loaded(tmp_path, rank, 4) for rank in range(4)] == [[], [(0, 6, 7)], [(1, 6, 7)], []]
    for rank in (2, 1):
        save(rank, 9, job=8)
    assert [loaded(tmp_path, rank, 4) for rank in range(4)] == [[], [(0, 9, 8)], [(1, 9, 8)], []]
    assert len(state_files.load(tmp_path, 0, 2)) == 2


def test_a_model_that_is_gone_on_some_ranks(tmp_path: Path) -> None:
    """Which rank has collected it first depends on its garbage collector: nobody restores it."""
    old = {"old": SavedSession(0, 2, 3, {}, job=6)}
    state_files.save(tmp_path, saved(0)._replace(sessions={**saved(0).sessions, **old}))
    state_files.save(tmp_path, saved(1))
    assert [loaded(tmp_path, rank) for rank in range(2)] == [[(0, 5, 7)], [(1, 5, 7)]]


def test_states_that_wait_are_carried_on(tmp_path: Path) -> None:
    """Saved by 3 ranks, loaded and saved again without a step by 1 rank and by 2, loaded by 3."""
    save_all(tmp_path / "3", size=3)
    before = tmp_path / "3"
    for size in (1, 2):
        for rank in range(size):
            waiting = PendingStates()
            waiting.put(state_files.load(before, rank, size), "topk")
            for _ in range(2):
                state_files.save(tmp_path / str(size), waiting.join("topk", World(rank, size), {}))
        before = tmp_path / str(size)
    assert [path.name.split("-")[1] for path in before.iterdir()] == ["000001"] * 2
    for rank in range(3):
        waiting = PendingStates()
        waiting.put(state_files.load(before, rank, 3), "topk")
        (name,) = waiting.names()
        own = waiting.join("topk", World(rank, 3), {})
        assert (own.sessions[name].rank, own.carried) == (rank, ())
        np.testing.assert_array_equal(own.sessions[name].buckets["b0"]["residual"], LEAVES["residual"])


class Trap:
    """Whoever unpickles it runs code."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('ran code from a file')",))


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"PK\x03\x04", pickle.dumps({"a": 1}), pickle.dumps(Trap()), b"\x93NUMPY\x01\x00"],
    ids=["empty", "text", "zip", "pickle", "trap", "npy"],
)
def test_foreign_files(tmp_path: Path, content: bytes) -> None:
    path = state_files.save(tmp_path, saved(0, size=1))
    path.write_bytes(content)
    with pytest.raises(StateError, match=r"no save in .* is complete: save 1 \(.* is damaged, or was not written by"):
        state_files.load(tmp_path, 0, 1)
    with pytest.raises(StateError, match=r"is damaged, or was not written by compression\.save"):
        state_files.read(path)


def test_archives_of_others(tmp_path: Path) -> None:
    path = tmp_path / "hvd_compress-000001-00000-of-00002.npz"
    with path.open("wb") as file:
        np.savez(file, weights=np.ones(3))
    with pytest.raises(StateError, match="is damaged, or was not written by"):
        state_files.read(path)
    with path.open("wb") as file:
        np.savez(file, header=np.array([Trap()], dtype=object))
    with pytest.raises(StateError, match="is damaged, or was not written by"):
        state_files.read(path)
    path.write_bytes(state_files.dump({}, {"format": "hvd_compress/1"}))
    with pytest.raises(StateError, match=r"has format='hvd_compress/1', but this version .* start without loading"):
        state_files.read(path)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return state_files.save(tmp_path_factory.mktemp("intact"), saved())


@given(data=st.data())
def test_no_damage_goes_unseen(intact: Path, data: st.DataObject) -> None:
    """A file that was cut short is refused; one with flipped bits is refused or says what it said."""
    content = bytearray(intact.read_bytes())
    path = intact.with_suffix(".damaged")
    if data.draw(st.booleans()):
        path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        with pytest.raises(StateError):
            state_files.read(path)
        return
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        back = state_files.read(path)
    except StateError:
        return
    for name, leaf in LEAVES.items():
        np.testing.assert_array_equal(back.sessions["m"].buckets["b0"][name], leaf)
