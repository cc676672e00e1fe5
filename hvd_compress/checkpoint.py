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
from typing import Any

import numpy as np

from hvd_compress.errors import StateError
from hvd_compress.redistribution import Leaves
from hvd_compress.saved import Saved, from_dict, to_dict

_HEADER = "header"


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
    arrays: dict[str, Any] = {}

    def place(leaf: Any) -> str:
        arrays[str(len(arrays))] = leaf
        return str(len(arrays) - 1)

    partial = path.with_suffix(".partial")
    partial.write_bytes(dump(arrays, to_dict(saved, place)))
    partial.replace(path)
    return path


def read(path: Path) -> Saved:
    """Read the file of a rank.

    Raises:
        StateError: If it is missing, damaged, or not such a file.
    """
    try:
        arrays, header = parse(path.read_bytes())
        return from_dict(header, arrays.__getitem__)
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}; each rank saves a file of its own") from error
    except (ValueError, KeyError, TypeError) as error:
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
    return saved
