"""Jobs that save, are killed at any point and are started again: each goes on from the last complete save."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.checkpoint import saves, state_files
from hvd_compress.checkpoint.state_dict import PendingStates, Saved, SavedSession
from hvd_compress.core.collectives import World

METHOD = "topk"


class Expected(NamedTuple):
    """What the last complete save holds."""

    job: int
    steps: int
    size: int


class Killed(BaseException):
    """A rank ends here."""


@contextmanager
def killed_after(calls: int | None) -> Iterator[list[str]]:
    """Let a rank get so far; None for all the way. Gives the names of the calls that it made."""
    done: list[str] = []

    def counted(name: str, call: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            if len(done) == calls:
                raise Killed
            done.append(name)
            return call(*arguments, **options)

        return run

    with (
        mock.patch.object(os, "fsync", counted("fsync", lambda _: None)),
        mock.patch.object(os, "replace", counted("replace", os.replace)),
        mock.patch.object(Path, "unlink", counted("unlink", Path.unlink)),
    ):
        try:
            yield done
        except Killed:
            return


class Job:
    """The ranks of one job, which go on from what is in a folder."""

    def __init__(self, folder: Path, number: int, size: int, expected: Expected | None) -> None:
        self.folder, self.number, self.size = folder, number, size
        self.waiting = [PendingStates() for _ in range(size)]
        self.steps, self.stepped = 0, False
        if expected is not None:
            self.steps = expected.steps
            for rank, loaded in enumerate(self.waiting):
                loaded.put(state_files.load(folder, rank, size), METHOD)
                check(loaded, World(rank, size), expected)

    def saved(self, rank: int, steps: int) -> Saved:
        """The state of a rank; what it has loaded, before its first step."""
        leaf = np.array([self.number, steps, rank])
        session = SavedSession(rank, self.size, steps, {"b0": {"leaf": leaf}}, job=self.number)
        return self.waiting[rank].join(METHOD, World(rank, self.size), {"m": session} if self.stepped else {})

    def save(self, order: list[int], points: list[int | None], stale: list[bool]) -> bool:
        """Save on all ranks; tells whether the save is complete. Some ranks may not see the others' files yet."""
        before, written = saves.files_in(self.folder), 0
        for rank, calls, late in zip(order, points, stale, strict=True):
            seen = mock.patch.object(state_files, "files_in", (lambda _: before) if late else saves.files_in)
            with killed_after(calls) as done, seen:
                state_files.save(self.folder, self.saved(rank, self.steps))
            written += "replace" in done
        return written == self.size


def check(loaded: PendingStates, world: World, expected: Expected) -> None:
    """Compare what a rank has loaded, its own state or those of all ranks, with what it should have."""
    parts = [session for part in loaded._saved for session in part.sessions.values()]
    assert {(part.job, part.steps) for part in parts} == {(expected.job, expected.steps)}
    ranks = sorted(part.rank for part in parts)
    assert ranks == list(range(expected.size)) or (world.size == expected.size and ranks == [world.rank])
    for part in parts:
        np.testing.assert_array_equal(part.buckets["b0"]["leaf"], [expected.job, expected.steps, part.rank])


@given(data=st.data())
def test_the_last_complete_save_is_loaded_by_all_ranks(data: st.DataObject) -> None:
    """Whatever the number of ranks, wherever each was killed, and however late its folder shows others' files."""
    with TemporaryDirectory() as name:
        expected: Expected | None = None
        for number in range(1, data.draw(st.integers(2, 6)) + 1):
            size = data.draw(st.integers(1, 4))
            job = Job(Path(name), number, size, expected)
            for _ in range(data.draw(st.integers(0, 4))):
                gone_on = data.draw(st.booleans()) or expected is None
                job.stepped = job.stepped or gone_on
                job.steps += gone_on
                points = data.draw(st.lists(st.none() | st.integers(0, 6), min_size=size, max_size=size))
                order = data.draw(st.permutations(range(size)))
                stale = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
                if job.save(list(order), points, stale) and job.stepped:
                    expected = Expected(number, job.steps, size)
                if points != [None] * size:
                    break
        last = Job(Path(name), 99, data.draw(st.integers(1, 4)), expected)
        assert last.steps == (0 if expected is None else expected.steps)
