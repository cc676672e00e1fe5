"""Saved states, and how each rank gets its own back, whatever the number of ranks was when they were saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from hvd_compress.collectives import World
from hvd_compress.errors import SpecError, StateError
from hvd_compress.group import Group
from hvd_compress.merging import Merge, check_merge
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.redistribution import Former, Kept, Leaves, redistribute
from hvd_compress.roles import Role
from hvd_compress.state import roles

FORMAT = "hvd_compress/1"

Buckets: TypeAlias = Mapping[str, Leaves]
"""The states of a session: bucket, then leaf."""


class SavedSession(NamedTuple):
    """The states of all buckets of one optimizer, as one rank has saved them.

    Attributes:
        rank: Which rank, among those that the optimizer reduces over.
        size: How many there were.
        steps: How many steps there had been: the same on all ranks that have saved together.
        buckets: The states.
        merge: The partition that the buckets are of; None if it was not saved: that of the session.
        search: Timings of the search for a better one so far; None if it has ended.
    """

    rank: int
    size: int
    steps: int
    buckets: Buckets
    merge: Merge | None = None
    search: Sequence[Sequence[float]] | None = None


class Saved(NamedTuple):
    """What a compressor of one rank has saved.

    Attributes:
        method: Spec of its method.
        rank: Which rank.
        size: How many there were.
        sessions: By name.
    """

    method: str
    rank: int
    size: int
    sessions: Mapping[str, SavedSession]


def to_dict(saved: Saved, convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Give a saved state as dicts, strings, numbers and converted leaves."""
    sessions = {
        name: {
            **session._asdict(),
            "buckets": {
                key: {path: convert(leaf) for path, leaf in leaves.items()} for key, leaves in session.buckets.items()
            },
        }
        for name, session in saved.sessions.items()
    }
    return {"format": FORMAT, **saved._asdict(), "sessions": sessions}


def from_dict(state: Any, convert: Callable[[Any], Any]) -> Saved:
    """Undo `to_dict`.

    Raises:
        StateError: If it is something else.
    """
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise StateError(f"this is not a state of a compressor: expected a dict with format={FORMAT!r}")
    try:
        sessions = {
            str(name): SavedSession(
                int(session["rank"]),
                int(session["size"]),
                int(session["steps"]),
                {
                    str(key): {str(path): convert(leaf) for path, leaf in leaves.items()}
                    for key, leaves in session["buckets"].items()
                },
                *_partition(session.get("merge"), session.get("search")),
            )
            for name, session in state["sessions"].items()
        }
        return Saved(str(state["method"]), int(state["rank"]), int(state["size"]), sessions)
    except (AttributeError, KeyError, SpecError, TypeError, ValueError) as error:
        raise StateError(f"this state of a compressor is damaged: {error!r}; take another one") from error


def _partition(merge: Any, search: Any) -> tuple[Merge | None, list[tuple[float, ...]] | None]:
    """Read what a session has saved of its partition and the search for it."""
    if merge is not None:
        check_merge(merge)
    return merge, None if search is None else [tuple(map(float, timing)) for timing in search]


class Restorable(Protocol):
    """A session of an adapter."""

    group: Group

    def by_bucket(self, merge: Merge | None = None) -> Mapping[str, Kept]:
        """The states of all buckets; new ones for a partition that was saved, if the session can go on with it."""

    def restore(self, saved: SavedSession) -> None:
        """Take over states that have been checked."""


class Loaded:
    """States that were loaded and wait for the optimizers that they belong to."""

    def __init__(self) -> None:
        self._saved: list[Saved] = []

    def put(self, saved: Sequence[Saved], method: str) -> None:
        """Take in the states of one or all ranks, in the place of what is waiting.

        Raises:
            StateError: If they are of another method. Nothing is changed.
        """
        for one in saved:
            if one.method != method:
                raise StateError(f"this state is of {one.method!r}, but the compressor is {method!r}")
        self._saved = list(saved)

    def names(self) -> set[str]:
        """The sessions that something waits for."""
        return {name for saved in self._saved for name in saved.sessions}

    def find(self, name: str, fresh: Mapping[str, Kept], world: World) -> SavedSession | None:
        """Give a session what was saved of it; None if there is nothing.

        Raises:
            StateError: If it does not fit.
        """
        return restored(self._saved, name, fresh, world) if name in self.names() else None

    def forget(self, name: str) -> None:
        """Let go of what a session has taken over."""
        self._saved = [s._replace(sessions={n: v for n, v in s.sessions.items() if n != name}) for s in self._saved]

    def give(self, sessions: Mapping[str, Restorable]) -> set[str]:
        """Give sessions what was saved of them, all or none; tells which of them got something.

        Raises:
            StateError: If something does not fit.
        """
        found = {name: self.find(name, s.by_bucket(self._merge(name)), s.group.world) for name, s in sessions.items()}
        given = {name: saved for name, saved in found.items() if saved is not None}
        for name, saved in given.items():
            sessions[name].restore(saved)
            self.forget(name)
        return set(given)

    def _merge(self, name: str) -> Merge | None:
        """The partition that a session was saved with; None if nothing is known of it."""
        return next((saved.sessions[name].merge for saved in self._saved if name in saved.sessions), None)

    def rest(self) -> dict[str, SavedSession]:
        """What still waits, to be saved again as it is.

        Raises:
            StateError: If it waits to be dealt out.
        """
        if len(self._saved) > 1 and self.names():
            raise StateError(
                "a state of another number of ranks was loaded and has not been dealt out yet: make a step before you"
                " save again (a job of one rank makes none: Horovod does not call its compression)"
            )
        return dict(self._saved[0].sessions) if self._saved else {}


def restored(saved: Sequence[Saved], name: str, fresh: Mapping[str, Kept], world: World) -> SavedSession:
    """Make the states of a session on this rank from those of the ranks that have saved.

    Where their number was another, each rank takes over what belonged to the ranks with its number modulo the number of
    ranks of now.

    Args:
        saved: From `load`.
        name: Of the session.
        fresh: Its buckets with new states.
        world: This rank among those of now.

    Raises:
        StateError: If the states are of another model or rank, or do not belong together.
    """
    sessions = [s.sessions[name] for s in saved if name in s.sessions]
    if len(sessions) != len(saved) or len({session.steps for session in sessions}) != 1:
        steps = ", ".join(str(session.steps) for session in sessions)
        raise StateError(f"the states of the ranks were saved at different steps ({steps}); take another checkpoint")
    first = sessions[0]
    alone = len(sessions) == 1 and (first.rank, first.size) == world
    if not alone and sorted(session.rank for session in sessions) != list(range(first.size)):
        raise StateError(
            f"this state was saved on rank {first.rank} of {first.size} and cannot be restored on rank {world.rank} of"
            f" {world.size}: residuals belong to their rank; give each rank its own state, or the folder with the files"
            " of all ranks to compression.load, which deals them out"
        )
    if any(set(session.buckets) != set(fresh) for session in sessions):
        raise StateError(f"the saved buckets {sorted(first.buckets)} do not fit: the model or merge= has changed")
    buckets: dict[str, Leaves] = {}
    for key, kept in fresh.items():
        expected = roles(kept.method.init(NumpyOps(), kept.bucket, world.size))
        for session in sessions:
            _check(key, kept.leaves, session.buckets[key], [] if alone else [Role.SERVED, Role.PRIVATE], expected)
        formers = [Former(session.buckets[key], session.rank, session.rank % world.size) for session in sessions]
        buckets[key] = (
            first.buckets[key]
            if alone
            else redistribute(kept.leaves, expected, kept.bucket.numel, formers, first.size, world)
        )
    return first._replace(rank=world.rank, size=world.size, buckets=buckets)


def _check(key: str, fresh: Leaves, saved: Leaves, free: Sequence[Role], expected: Mapping[str, Role]) -> None:
    """Compare saved leaves with those of a new state; those of some roles may be of other shapes."""
    for path, leaf in fresh.items():
        old, new = np.asarray(leaf), np.asarray(saved.get(path))
        fits = new.dtype == old.dtype and (new.shape == old.shape or expected[path] in free)
        if not fits:
            raise StateError(
                f"{path!r} of bucket {key!r} does not fit: expected shape {old.shape} and {old.dtype}, got shape"
                f" {new.shape} and {new.dtype}; restore with the model, merge= and method that were saved"
            )
