"""Files of states: they come back as they were, and what is damaged is refused with a clear error."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress import checkpoint
from hvd_compress.errors import StateError
from hvd_compress.saved import Saved, SavedSession

LEAVES: dict[str, Any] = {
    "residual": np.arange(6, dtype=np.float32),
    "inner.step": 7,
    "codes": np.array([1, -2], np.int8),
    "achieved": np.float64(0.5),
}


def saved(rank: int = 0, size: int = 2, steps: int = 5) -> Saved:
    return Saved("topk", rank, size, {"m": SavedSession(rank, size, steps, {"b0": LEAVES, "b1": {}})})


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "new" / "folder", saved())
    assert [p.name for p in path.parent.iterdir()] == ["hvd_compress-00000-of-00002.npz"]
    back = checkpoint.read(path)
    assert back._replace(sessions={}) == saved()._replace(sessions={})
    session = back.sessions["m"]
    assert session._replace(buckets={}) == SavedSession(0, 2, 5, {})
    assert session.buckets["b1"] == {}
    for name, leaf in LEAVES.items():
        np.testing.assert_array_equal(session.buckets["b0"][name], leaf)
        assert session.buckets["b0"][name].dtype == np.asarray(leaf).dtype


def test_the_files_of_all_ranks_are_read_where_the_number_differs(tmp_path: Path) -> None:
    for rank in range(2):
        checkpoint.save(tmp_path, saved(rank))
    assert [s.rank for s in checkpoint.load(tmp_path, 1, 2)] == [1]
    assert [s.rank for s in checkpoint.load(tmp_path, 3, 4)] == [0, 1]


def test_incomplete_and_mixed_folders(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no state found in"):
        checkpoint.load(tmp_path, 0, 1)
    checkpoint.save(tmp_path, saved(1))
    with pytest.raises(StateError, match=r"hvd_compress-00000-of-00002\.npz cannot be read: No such file"):
        checkpoint.load(tmp_path, 0, 1)
    checkpoint.save(tmp_path, saved(0, size=3))
    with pytest.raises(StateError, match="states of several numbers of ranks found"):
        checkpoint.load(tmp_path, 0, 1)


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
    path = checkpoint.file_of(tmp_path, 0, 2)
    path.write_bytes(content)
    with pytest.raises(StateError, match=r"is damaged, or is not a state that compression\.save has written"):
        checkpoint.read(path)


def test_archives_of_others(tmp_path: Path) -> None:
    path = checkpoint.file_of(tmp_path, 0, 2)
    with path.open("wb") as file:
        np.savez(file, weights=np.ones(3))
    with pytest.raises(StateError, match="is damaged, or is not a state"):
        checkpoint.read(path)
    with path.open("wb") as file:
        np.savez(file, header=np.array([Trap()], dtype=object))
    with pytest.raises(StateError, match="is damaged, or is not a state"):
        checkpoint.read(path)
    path.write_bytes(checkpoint.dump({}, {"format": "hvd_compress/99"}))
    with pytest.raises(StateError, match="expected a dict with format='hvd_compress/1'"):
        checkpoint.read(path)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.save(tmp_path_factory.mktemp("intact"), saved())


@given(data=st.data())
def test_no_damage_goes_unseen(intact: Path, data: st.DataObject) -> None:
    """A file that was cut short is refused; one with flipped bits is refused or says what it said."""
    content = bytearray(intact.read_bytes())
    path = intact.with_suffix(".damaged")
    if data.draw(st.booleans()):
        path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        with pytest.raises(StateError):
            checkpoint.read(path)
        return
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        back = checkpoint.read(path)
    except StateError:
        return
    for name, leaf in LEAVES.items():
        np.testing.assert_array_equal(back.sessions["m"].buckets["b0"][name], leaf)
