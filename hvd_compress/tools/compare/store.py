"""The folder of a comparison: every training that has ended is there, so that an interrupted comparison can go on.

::

    settings.json   the conditions, which are the same for all trainings in the folder
    runs/           a file for each training
    results.json    all that is known; report.md and the pictures are made of it

Files are written under another name first, ending in ``.part``, so that none is ever there by half.
"""

from __future__ import annotations

import fcntl
import json
import re
from pathlib import Path
from typing import IO, Any

from hvd_compress.errors import SpecError, StateError
from hvd_compress.tools.compare.job import Job, Outcome
from hvd_compress.tools.compare.results import outcome_facts, outcome_of, write_whole

Key = tuple[str, int, float | None]
"""The spec, seed and learning rate of a training."""


class Store:
    """A folder, held by one process at a time.

    Args:
        folder: Made if it is not there.
        conditions: What all trainings have in common.

    Raises:
        SpecError: If the folder belongs to a comparison under other conditions, or to something else.
        StateError: If another process works in it, or a file in it cannot be read.
    """

    def __init__(self, folder: Path, conditions: dict[str, Any]) -> None:
        self.folder = folder
        self._runs = folder / "runs"
        _refuse_other(folder, conditions)
        _make(self._runs)
        self._outcomes: dict[Key, Outcome] = {}
        self._vnmse: dict[str, float | None] = {}
        self._lock = _locked(folder)
        try:
            for part in [*folder.glob("*.part"), *self._runs.glob("*.part")]:
                part.unlink()
            write_whole(folder / "settings.json", json.dumps(conditions, indent=1) + "\n")
            for path in sorted(self._runs.glob("*.json")):
                self._read(path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.close()

    def _read(self, path: Path) -> None:
        try:
            facts = json.loads(path.read_text())
            if "vnmse" in facts:
                self._vnmse[facts["spec"]] = facts["vnmse"]
            else:
                outcome = outcome_of(facts)
                self._outcomes[outcome.spec, outcome.seed, outcome.lr] = outcome
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(
                f"{path} is not a training of this version ({error}); remove it, and it is done again"
            ) from None

    def outcome(self, job: Job) -> Outcome | None:
        return self._outcomes.get((job.spec, job.seed, job.lr))

    def vnmse(self, spec: str) -> float | None:
        return self._vnmse.get(spec)

    def measured(self, spec: str) -> bool:
        """Return whether the error of a method has been asked for."""
        return spec in self._vnmse

    def keep(self, outcome: Outcome) -> None:
        self._outcomes[outcome.spec, outcome.seed, outcome.lr] = outcome
        lr = "" if outcome.lr is None else f" lr={outcome.lr:g}"
        self._write(f"{outcome.spec}{lr} seed={outcome.seed}", outcome_facts(outcome))

    def keep_vnmse(self, spec: str, vnmse: float | None) -> None:
        self._vnmse[spec] = vnmse
        self._write(f"{spec} vnmse", {"spec": spec, "vnmse": vnmse})

    def log(self) -> Path:
        """Make a new file for what a training tells while it runs."""
        path = self._runs / "log.part"
        path.write_text("")
        return path

    def _write(self, name: str, facts: dict[str, Any]) -> None:
        name = re.sub(r"[^A-Za-z0-9=._-]+", "-", name)
        write_whole(self._runs / f"{name}.json", json.dumps(facts) + "\n")


def _refuse_other(folder: Path, conditions: dict[str, Any]) -> None:
    settings = folder / "settings.json"
    if not settings.exists():
        if folder.is_dir() and any(folder.iterdir()):
            raise SpecError(f"--output {folder} is a folder of something else: name a new one, or an empty one")
        return
    try:
        before = json.loads(settings.read_text())
    except ValueError:
        raise StateError(f"{settings} cannot be read: remove the folder, or name another with --output") from None
    other = {name for name in conditions.keys() | before.keys() if conditions.get(name) != before.get(name)}
    if other:
        found = ", ".join(f"{name} {before.get(name)!r} and not {conditions.get(name)!r}" for name in sorted(other))
        raise SpecError(f"--output {folder} holds a comparison with {found}: name another folder with --output")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"--output: cannot make {folder} ({error.strerror}); name a folder that can be made") from None


def _locked(folder: Path) -> IO[str]:
    file = (folder / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise StateError(f"another hvd-compress compare works in {folder}: wait for it, or name another") from None
    return file
