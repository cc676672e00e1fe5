"""The folder of a comparison: nothing in it is ever there by half, and it is not mixed with another."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_compress.errors import SpecError, StateError
from hvd_compress.tools.compare.job import Goal, Job, Outcome, Point
from hvd_compress.tools.compare.store import Store

CONDITIONS = {"task": "digits", "epochs": None, "where": {"hosts": 2}}


def outcome(spec: str = "topk:ratio=0.01", seed: int = 0, lr: float | None = None) -> Outcome:
    goal = Goal("accuracy", True, 0.9, 10, 100)
    curve = [Point(0, 0.0, 0.1), Point(10, 1.5, 0.95)]
    numbers = (10, 1.5, 0.15, 0.1, 0.01, None, 0.02, 400.0, 8.0, None, 10**8)
    return Outcome(spec, seed, lr, goal, curve, *numbers, diverged=False, ranks_equal=True)


def test_what_was_kept_is_there_for_the_next(tmp_path: Path) -> None:
    kept = [outcome(), outcome(seed=1), outcome(lr=0.1), outcome("fp16")]
    first = Store(tmp_path / "new", CONDITIONS)
    for one in kept:
        first.keep(one)
    first.keep_vnmse("topk:ratio=0.01", 0.25)
    first.keep_vnmse("qsgd", None)
    first.close()
    again = Store(tmp_path / "new", CONDITIONS)
    for one in kept:
        assert again.outcome(Job("digits", one.spec, one.seed, one.lr)) == one
    assert again.outcome(Job("digits", "fp16", 1)) is None
    assert again.vnmse("topk:ratio=0.01") == 0.25
    assert again.measured("qsgd") and not again.measured("fp16")
    again.close()


def test_what_was_written_by_half_is_removed(tmp_path: Path) -> None:
    Store(tmp_path, CONDITIONS).close()
    halves = [tmp_path / "results.json.part", tmp_path / "runs" / "log.part"]
    for path in halves:
        path.write_text('{"goal": {"met')
    Store(tmp_path, CONDITIONS).close()
    assert not any(path.exists() for path in halves)


def test_other_conditions_are_refused_and_named(tmp_path: Path) -> None:
    Store(tmp_path, CONDITIONS).close()
    with pytest.raises(SpecError, match=r"epochs None and not 3: name another folder"):
        Store(tmp_path, CONDITIONS | {"epochs": 3})


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "thesis.part"
    mine.write_text("all of it")
    with pytest.raises(SpecError, match="folder of something else"):
        Store(tmp_path, CONDITIONS)
    assert mine.read_text() == "all of it"


def test_two_do_not_work_in_one_folder(tmp_path: Path) -> None:
    first = Store(tmp_path, CONDITIONS)
    with pytest.raises(StateError, match="another hvd-compress compare works in"):
        Store(tmp_path, CONDITIONS)
    first.close()
    Store(tmp_path, CONDITIONS).close()


@pytest.mark.parametrize("text", ["", "{", '{"spec": "topk"}', "[1]"])
def test_a_damaged_training_is_named(tmp_path: Path, text: str) -> None:
    store = Store(tmp_path, CONDITIONS)
    store.keep(outcome())
    store.close()
    (path,) = (tmp_path / "runs").glob("*.json")
    path.write_text(text)
    with pytest.raises(StateError, match="remove it, and it is done again"):
        Store(tmp_path, CONDITIONS)
