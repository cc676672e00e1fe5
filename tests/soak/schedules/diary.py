"""What each rank writes down while a job runs; read when all have ended, killed ones too."""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Arr: TypeAlias = "np.ndarray[Any, Any]"

OWN = ("residual", "velocity", "local", "served")
"""Last words of the names of leaves that belong to a rank; all others are equal on all ranks."""

KEPT = ("residual", "served")
"""Those that hold what was not sent yet."""


class Mass(NamedTuple):
    """The sum of the elements of vectors, and how large they are.

    Attributes:
        total: The sum, in double precision.
        size: The sum of their magnitudes, for tolerances.
    """

    total: float
    size: float

    @classmethod
    def of(cls, arrays: Iterable[Arr]) -> Mass:
        """The mass of some arrays."""
        wide = [np.asarray(array, np.float64) for array in arrays]
        return cls(sum(float(a.sum()) for a in wide), sum(float(np.abs(a).sum()) for a in wide))

    @classmethod
    def join(cls, masses: Iterable[Mass]) -> Mass:
        """The mass of all ranks."""
        found = list(masses)
        return cls(sum(mass.total for mass in found), sum(mass.size for mass in found))


class State(NamedTuple):
    """The state of a compressor on one rank.

    Attributes:
        leaves: Digests of all that it keeps, by name.
        kept: What this rank has not sent yet.
    """

    leaves: Mapping[str, str]
    kept: Mass

    @classmethod
    def of(cls, leaves: Mapping[str, Arr], rank: int) -> State:
        """The state of a rank that consists of some leaves, of the form ``"session/bucket/path"``."""
        kept = [
            _served(name, leaves, rank) if _last(name) == "served" else leaves[name] for name in leaves if _keeps(name)
        ]
        return cls({name: digest([leaf]) for name, leaf in leaves.items()}, Mass.of(kept))


def is_shared(name: str) -> bool:
    """Whether a leaf is equal on all ranks."""
    return _last(name) not in OWN


def _served(name: str, leaves: Mapping[str, Arr], rank: int) -> Arr:
    """What a rank serves of a bucket, without what fills up the last parts: that is of no gradient."""
    part, bucket = leaves[name], name.rpartition("/")[0]
    numel = next(one.size for other, one in leaves.items() if other.startswith(bucket) and _last(other) == "residual")
    return part[: max(0, numel - rank * part.size)]


def _keeps(name: str) -> bool:
    return _last(name) in KEPT


def _last(name: str) -> str:
    return re.split(r"[./]", name)[-1]


class Part(NamedTuple):
    """What a step came to for one of the optimizers.

    Attributes:
        reduced: Digest of the reduced gradients.
        counts: Whether these were applied: they are finite, and were not thrown away.
        gradient: What this rank has put in; none if that does not count.
        applied: What all ranks together have got out.
    """

    reduced: str
    counts: bool
    gradient: Mass
    applied: Mass

    @classmethod
    def of(cls, local: Sequence[Arr], mean: Sequence[Arr], thrown: bool, ranks: int) -> Part:
        """The part of some gradients.

        Args:
            local: Of this rank.
            mean: Over all ranks.
            thrown: Whether they are thrown away.
            ranks: How many.
        """
        if thrown or not all(bool(np.isfinite(array).all()) for array in mean):
            return cls(digest(mean), False, Mass(0.0, 0.0), Mass(0.0, 0.0))
        return cls(digest(mean), True, Mass.of(local), Mass.of(array * ranks for array in mean))


class Stepped(NamedTuple):
    """A step that was made.

    Attributes:
        step: Its number.
        weights: Digest of the weights after it.
        parts: What it came to, by optimizer.
        state: After it.
    """

    step: int
    weights: str
    parts: Mapping[str, Part]
    state: State

    @property
    def empty(self) -> bool:
        """Whether nothing of it counts."""
        return not any(part.counts for part in self.parts.values())

    @property
    def reduced(self) -> list[str]:
        """Digests of the reduced gradients."""
        return [part.reduced for part in self.parts.values()]

    @property
    def gradient(self) -> Mass:
        """What this rank has put in."""
        return Mass.join(part.gradient for part in self.parts.values())

    @property
    def applied(self) -> Mass:
        """What all ranks together have got out."""
        return Mass.join(part.applied for part in self.parts.values())


class Saving(NamedTuple):
    """A save has begun after a step."""

    step: int
    kept: Mass


class Saved(NamedTuple):
    """A save has ended, as far as this rank is concerned."""

    step: int


class Loaded(NamedTuple):
    """A state was loaded, or waits for the first step."""


class End(NamedTuple):
    """The rank has come to an end.

    Attributes:
        error: Class of the exception; empty without one.
        typed: Whether it is an error of this package.
        lost: Whether it is what Horovod says of a rank that is gone.
        message: Of the exception.
        trace: Where it was raised.
    """

    error: str = ""
    typed: bool = False
    lost: bool = False
    message: str = ""
    trace: str = ""


Entry: TypeAlias = "Stepped | Saving | Saved | Loaded | End"


class Diary:
    """Writes entries to a file, each at once.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, entry: Entry) -> None:
        """Add an entry."""
        self._file.write(pickle.dumps(entry))


def read(path: Path) -> list[Entry]:
    """Read all whole entries; none if there is no file."""
    entries: list[Entry] = []
    if not path.exists():
        return entries
    with path.open("rb") as file:
        while True:
            try:
                entries.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):
                return entries


def digest(arrays: Iterable[Any]) -> str:
    """A short text that stands for the bits of arrays."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]
