"""Saved states as files, one per rank, loadable with any world size.

Saves are atomic: each save writes new files, each file appears as a whole, and `load` takes the newest complete save.
Older files are removed only after a newer save is complete. A file is a zip archive of numpy arrays (``.npz``), so each
array has a checksum and no content can run code.
"""

from __future__ import annotations

import io
import json
import logging
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from hvd_compress.checkpoint.resharding import Leaves
from hvd_compress.checkpoint.saves import File, files_in, flaw, follows, needed, number_of
from hvd_compress.checkpoint.state_dict import Saved, from_dict, to_dict
from hvd_compress.errors import StateError

_HEADER = "header"
_LOG = logging.getLogger("hvd_compress")


def dump(leaves: Leaves, header: Mapping[str, Any]) -> bytes:
    """Serialise named arrays and ints, and a header of plain values."""
    file = io.BytesIO()
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(file, **{_HEADER: text, **{f"/{path}": np.asarray(leaf) for path, leaf in leaves.items()}})
    return file.getvalue()


def parse(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Undo `dump`: return the leaves as arrays, and the header.

    Raises:
        ValueError: If the bytes are damaged or not from `dump`.
    """
    return _parse(io.BytesIO(data), whole=True)


def _parse(source: IO[bytes], whole: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the header, and the leaves if ``whole``."""
    try:
        with np.load(source, allow_pickle=False) as file:
            arrays = {name: file[name] for name in (file.files if whole else [_HEADER])}
        header = json.loads(arrays.pop(_HEADER).tobytes())
        if not isinstance(header, dict):
            raise ValueError("the header is not a table")
        return {name.removeprefix("/"): array for name, array in arrays.items()}, header
    except (OSError, EOFError, KeyError, MemoryError, OverflowError, TypeError, zipfile.error, RuntimeError) as error:
        raise ValueError(str(error)) from error


def read(path: Path, whole: bool = True) -> Saved:
    """Read the file of a rank.

    Args:
        path: The file.
        whole: Read the arrays too; otherwise their names replace them.

    Raises:
        StateError: If it is missing, damaged, or not a saved state.
    """
    try:
        with path.open("rb") as file:
            arrays, header = _parse(file, whole)
        return from_dict(header, arrays.__getitem__ if whole else str)
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}; each rank saves and loads its own file") from error
    except StateError as error:
        raise StateError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{path} is damaged, or was not written by compression.save ({error}): remove the files of this save on all"
            " ranks to resume from an older one"
        ) from error


class Written(NamedTuple):
    """A file that this rank has written.

    Attributes:
        path: The file.
        saved: Its state, without the arrays.
    """

    path: Path
    saved: Saved

    @classmethod
    def of(cls, path: Path, saved: Saved) -> Written:
        """Return a file that has been written."""
        sessions = {name: session._replace(buckets={}) for name, session in saved.sessions.items()}
        return cls(path, saved._replace(sessions=sessions, carried=()))

    def missing(self, now: Saved) -> list[int]:
        """Return the ranks that have trained on with this one, so come past this save, and have no file beside it.

        Args:
            now: The state to save next.
        """
        if not (follows(now, self.saved) and self.path.exists()):
            return []
        here = {file.rank for file in files_in(self.path.parent) if file.size == now.size}
        members = {rank for session in self.saved.sessions.values() for rank in session.members}
        return sorted(members - here)


def save(folder: str | os.PathLike[str], saved: Saved) -> Path:
    """Write the file of a rank, and remove its files of outdated saves.

    Returns:
        Path of the file.

    Raises:
        StateError: If another compressor saves to the folder, too.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _check_alone(folder, saved)
    arrays: dict[str, Any] = {}

    def place(leaf: Any) -> str:
        arrays[str(len(arrays))] = leaf
        return str(len(arrays) - 1)

    header = to_dict(saved, place)
    data = dump(arrays, header)
    file = File(_number(folder, saved), saved.rank, saved.size)
    if file.path(folder).exists():
        if file.path(folder).read_bytes() == data:
            return file.path(folder)
        file = file._replace(number=file.number + 1)
    _write(file.path(folder), file.partial(folder), data)
    _clean_up(folder, file.number, saved)
    return file.path(folder)


def _check_alone(folder: Path, saved: Saved) -> None:
    """Reject a folder to which another compressor has saved since the last save of this one: it would load the newer.

    Raises:
        StateError: If it has.
    """
    mine = [file for file in files_in(folder) if (file.rank, file.size) == (saved.rank, saved.size)]
    newest, *older = [_glance(folder, file) for file in mine[:3]] or [None]
    if newest is None or any(session.job == _job(newest, name) for name, session in saved.sessions.items()):
        return
    if any(before is not None and follows(saved, before) for before in older):
        raise StateError(
            f"another compressor has saved to {folder} since this one did, and each would load the newer save of both:"
            " use one folder per compressor"
        )


def _job(saved: Saved, name: str) -> int | None:
    return saved.sessions[name].job if name in saved.sessions else None


def _number(folder: Path, saved: Saved) -> int:
    """Return the number of the save that a rank's file belongs to."""
    there = files_in(folder)
    if not there:
        return 1
    newest = [file for file in there if file.number == there[0].number]
    own = File(newest[0].number, saved.rank, saved.size)
    return number_of(_glance(folder, own if own in newest else newest[0]), saved, own.number)


def _glance(folder: Path, file: File) -> Saved | None:
    """Read a file without its arrays; None if that fails."""
    try:
        return read(file.path(folder), whole=False)
    except StateError:
        return None


def _write(path: Path, partial: Path, data: bytes) -> None:
    """Write a file atomically, even if the machine fails."""
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _clean_up(folder: Path, number: int, saved: Saved) -> None:
    """Remove a rank's files of all saves before the previous one, if that is complete.

    Args:
        folder: The folder.
        number: Number of the save that the ranks are writing.
        saved: This rank's state in it.
    """
    for partial in folder.glob(File(number, saved.rank, saved.size).partial(folder).name.replace(f"{number:06d}", "*")):
        partial.unlink(missing_ok=True)
    older = [file for file in files_in(folder) if file.number < number]
    last = next((file for file in older if file.rank == saved.rank or file.size != saved.size), None)
    if last is None:
        return
    _, why = _inspect(folder, older, last.number, last.size)
    if not why:
        for file in older:
            if file.number < last.number and file.rank % saved.size == saved.rank:
                file.path(folder).unlink(missing_ok=True)
        return
    before = _glance(folder, File(last.number, saved.rank, saved.size))
    if before is not None and follows(saved, before):  # all ranks have made a step since then
        _LOG.warning(
            "save %d in %s cannot be loaded: %s; all ranks must save at the same steps, into one shared folder",
            last.number,
            folder,
            why,
        )


def _inspect(folder: Path, there: Sequence[File], number: int, size: int) -> tuple[list[Saved], str]:
    """Read the files of a save without their arrays.

    Returns:
        The files of all ranks, and the reason why they cannot be loaded, empty if they can.
    """
    files = [file for file in there if (file.number, file.size) == (number, size)]
    try:
        found = [read(file.path(folder), whole=False) for file in files]
    except StateError as error:
        return [], str(error)
    return found, flaw(found, size)


def load(folder: str | os.PathLike[str], rank: int, size: int, step: int | None = None) -> list[Saved]:
    """Read what a rank needs of the newest complete save; incomplete saves are skipped with a warning.

    Args:
        folder: The folder.
        rank: This rank.
        size: Current world size.
        step: Step of the save; None for any.

    Returns:
        The file of this rank alone if the world size is unchanged, none if it has saved nothing; otherwise those of
        all ranks.

    Raises:
        StateError: If no save is complete, or a file of the newest complete save is damaged.
    """
    folder = Path(folder)
    there, flaws, apart = files_in(folder), list[str](), False
    for number, before in dict.fromkeys((file.number, file.size) for file in there):
        found, why = _inspect(folder, there, number, before)
        if not why and step not in (None, found[0].step):
            why = f"it is of step {found[0].step}, not {step}"
        if not why and before == size and rank not in (one.rank for one in found):
            apart = True  # it is of ranks that train without this one
        elif not why:
            for skipped in flaws:
                _LOG.warning("%s: skipped %s; resuming from save %d", folder, skipped, number)
            return [
                _restrict(read(File(number, one.rank, one.size).path(folder)), one) for one in needed(found, rank, size)
            ]
        else:
            flaws.append(f"save {number} (hvd_compress-{number:06d}-*-of-{before:05d}.npz): {why}")
    if apart and not any((file.rank, file.size) == (rank, size) for file in there):
        return []
    if not flaws:
        raise StateError(
            f"the folder {folder} holds no saved state that this version can read: pass the folder that"
            " compression.save wrote to, or start without loading (residuals begin at zero)"
        )
    wanted = "complete" if step is None else f"complete and of step {step}"
    raise StateError(
        f"no save in {folder} is {wanted}: {'; '.join(flaws)}. Save on all ranks at the same steps into one shared"
        " folder (or copy the files of all hosts into one), or start without loading (residuals begin at zero)"
    )


def _restrict(saved: Saved, header: Saved) -> Saved:
    """Limit a state to the sessions of its header."""
    return saved._replace(sessions={name: saved.sessions[name] for name in header.sessions})
