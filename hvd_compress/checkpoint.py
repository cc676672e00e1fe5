"""Saved states: one file for each rank, readable by any number of ranks.

A file is a zip archive of numpy arrays (``.npz``), so that each array has a checksum and nothing in it can run code.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hvd_compress.errors import StateError
from hvd_compress.redistribution import Leaves

FORMAT = "hvd_compress/1"

_HEADER = "header"

Buckets: TypeAlias = Mapping[str, Leaves]
"""The states of a session: bucket, then leaf."""


class SavedSession(NamedTuple):
    """The states of all buckets of one optimizer, as one rank has saved them.

    Attributes:
        rank: Which rank, among those that the optimizer reduces over.
        size: How many there were.
        buckets: The states.
    """

    rank: int
    size: int
    buckets: Buckets


class Saved(NamedTuple):
    """What a compressor of one rank has saved.

    Attributes:
        method: Spec of its method.
        rank: Which rank.
        size: How many there were.
        steps: How many steps there had been: the same in all files that belong together.
        sessions: By the name of the session.
    """

    method: str
    rank: int
    size: int
    steps: int
    sessions: Mapping[str, SavedSession]


def file_of(folder: str | os.PathLike[str], rank: int, size: int) -> Path:
    """Where a rank saves its state."""
    return Path(folder) / f"hvd_compress-{rank:05d}-of-{size:05d}.npz"


def dump(leaves: Leaves, header: Mapping[str, Any]) -> bytes:
    """Write named arrays and ints, and a header of plain values, to bytes."""
    file = io.BytesIO()
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(file, **{_HEADER: text, **{f"/{path}": np.asarray(leaf) for path, leaf in leaves.items()}})
    return file.getvalue()


def parse(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Undo `dump`: the leaves, all as arrays, and the header.

    Raises:
        ValueError: If the bytes are not what `dump` wrote.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(arrays.pop(_HEADER).tobytes())
        if not isinstance(header, dict):
            raise ValueError("the header is not a table")
        return {name.removeprefix("/"): array for name, array in arrays.items()}, header
    except (OSError, EOFError, KeyError, MemoryError, OverflowError, TypeError, zipfile.error, RuntimeError) as error:
        raise ValueError(str(error)) from error


def save(folder: str | os.PathLike[str], saved: Saved) -> Path:
    """Write the file of a rank; an older one is replaced at once or not at all.

    Returns:
        The file.
    """
    path = file_of(folder, saved.rank, saved.size)
    path.parent.mkdir(parents=True, exist_ok=True)
    leaves = {
        f"{name}/{key}/{leaf_path}": leaf
        for name, session in saved.sessions.items()
        for key, bucket in session.buckets.items()
        for leaf_path, leaf in bucket.items()
    }
    sessions = {
        name: {"rank": s.rank, "size": s.size, "buckets": {key: list(bucket) for key, bucket in s.buckets.items()}}
        for name, s in saved.sessions.items()
    }
    header = {"format": FORMAT, **saved._asdict(), "sessions": sessions}
    partial = path.with_suffix(".partial")
    partial.write_bytes(dump(leaves, header))
    partial.replace(path)
    return path


def read(path: Path) -> Saved:
    """Read the file of a rank.

    Raises:
        StateError: If it is missing, damaged, or not such a file.
    """
    try:
        leaves, header = parse(path.read_bytes())
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']!r}, not {FORMAT!r}")
        sessions = {
            name: SavedSession(
                int(s["rank"]),
                int(s["size"]),
                {key: {p: leaves[f"{name}/{key}/{p}"] for p in paths} for key, paths in s["buckets"].items()},
            )
            for name, s in header["sessions"].items()
        }
        rank, size, steps = (int(header[key]) for key in ("rank", "size", "steps"))
        return Saved(str(header["method"]), rank, size, steps, sessions)
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}; each rank saves a file of its own") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(
            f"{path} is damaged, or is not a state that compression.save has written ({error}); take another checkpoint"
        ) from error


def load(folder: str | os.PathLike[str], rank: int, size: int) -> list[Saved]:
    """Read what a rank needs: its own file if as many ranks have saved, else those of all ranks that have.

    Returns:
        The files of all ranks of before in their order; a single one if there were as many as now.

    Raises:
        StateError: If a file is missing or damaged, or files are not of the same step.
    """
    own = file_of(folder, rank, size)
    if own.exists():
        return [read(own)]
    found = sorted(Path(folder).glob(file_of("", 0, 0).name.replace("00000", "*")))
    sizes = {path.stem.rpartition("-")[2] for path in found}
    if len(sizes) != 1:
        what = "states of several numbers of ranks" if sizes else "no state"
        raise StateError(
            f"{what} found in {folder}, but not {own.name}; give the folder that compression.save was given"
        )
    before = int(next(iter(sizes)))
    saved = [read(file_of(folder, number, before)) for number in range(before)]
    if len({(s.method, s.steps) for s in saved}) != 1:
        steps = ", ".join(str(s.steps) for s in saved)
        raise StateError(f"the files in {folder} were saved at different steps ({steps}); take another checkpoint")
    return saved
