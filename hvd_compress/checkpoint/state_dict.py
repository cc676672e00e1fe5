"""Saved states, and how each rank gets its own back, whatever the number of ranks was when they were saved."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from hvd_compress.bucketing import Merge, check_merge
from hvd_compress.checkpoint.resharding import Former, Kept, Leaves, redistribute
from hvd_compress.core.collectives import World
from hvd_compress.core.state_tree import Kind, Per, Role, kinds
from hvd_compress.errors import SpecError, StateError
from hvd_compress.ops.numpy import NumpyOps

FORMAT = "hvd_compress/2"

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
        job: The number that the ranks had agreed on (see `hvd_compress.checkpoint.agreement.check`). States of the same
            job and step belong together.
        shared: Checksum of what must be equal on all ranks, from `fingerprint`.
        came: How the gradient of each parameter came in the first step, for adapters whose buckets depend on it.
    """

    rank: int
    size: int
    steps: int
    buckets: Buckets
    merge: Merge | None = None
    search: Sequence[Sequence[float]] | None = None
    job: int = 0
    shared: int = 0
    came: Sequence[int] | None = None


class Saved(NamedTuple):
    """What a compressor of one rank has saved.

    Attributes:
        method: Spec of its method.
        rank: Which rank.
        size: How many there were.
        sessions: By name.
        carried: States of another number of ranks that no session has taken over yet: they are passed on unchanged.
    """

    method: str
    rank: int
    size: int
    sessions: Mapping[str, SavedSession]
    carried: Sequence[Saved] = ()


def fingerprint(buckets: Buckets, kinds: Mapping[str, Mapping[str, Kind]]) -> int:
    """Return a checksum of the leaves that must be equal on all ranks.

    Args:
        buckets: The states of a session.
        kinds: What their leaves are, from `hvd_compress.core.state_tree.kinds`.
    """
    checksum = 0
    for key, leaves in sorted(buckets.items()):
        for path, leaf in sorted(leaves.items()):
            array = np.asarray(leaf)
            if kinds[key][path].role in (Role.SHARED, Role.TOTAL):
                checksum = zlib.crc32(f"{key}/{path}{array.dtype}{array.shape}".encode(), checksum)
                checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    return checksum


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
    carried = [to_dict(part, convert) for part in saved.carried]
    return {"format": FORMAT, **saved._asdict(), "sessions": sessions, "carried": carried}


def from_dict(state: Any, convert: Callable[[Any], Any]) -> Saved:
    """Undo `to_dict`.

    Raises:
        StateError: If it is something else.
    """
    if not isinstance(state, Mapping) or not str(state.get("format")).startswith("hvd_compress/"):
        raise StateError(f"this is not a state of a compressor: expected a dict with format={FORMAT!r}")
    if state["format"] != FORMAT:
        raise StateError(
            f"this state has format={state['format']!r}, and this version of hvd_compress reads {FORMAT!r} only: start"
            " without it (residuals begin at zero), or load it with the version that saved it"
        )
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
                int(session["job"]),
                int(session["shared"]),
                None if session["came"] is None else [int(one) for one in session["came"]],
            )
            for name, session in state["sessions"].items()
        }
        carried = tuple(from_dict(part, convert) for part in state["carried"])
        return Saved(str(state["method"]), int(state["rank"]), int(state["size"]), sessions, carried)
    except (AttributeError, KeyError, SpecError, TypeError, ValueError) as error:
        raise StateError(f"this state of a compressor is damaged: {error!r}; take another one") from error


def _partition(merge: Any, search: Any) -> tuple[Merge | None, list[tuple[float, ...]] | None]:
    """Read what a session has saved of its partition and the search for it."""
    if merge is not None:
        check_merge(merge)
    return merge, None if search is None else [tuple(map(float, timing)) for timing in search]


class Restorable(Protocol):
    """A session of an adapter."""

    @property
    def world(self) -> World:
        """The ranks that it exchanges with."""

    def by_bucket(self, saved: SavedSession | None = None) -> Mapping[str, Kept]:
        """The states of all buckets; new ones for those of a saved state, if the session can go on with them."""

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
                raise StateError(
                    f"this state is of {one.method!r}, but the compressor is {method!r}: make the compressor from the"
                    f" spec {one.method!r} to go on from this state, or start without loading it (residuals begin at"
                    " zero)"
                )
        self._saved = [part for one in saved for part in (one._replace(carried=()), *one.carried)]

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
        found = {name: self.find(name, s.by_bucket(self._first(name)), s.world) for name, s in sessions.items()}
        given = {name: saved for name, saved in found.items() if saved is not None}
        for name, saved in given.items():
            sessions[name].restore(saved)
            self.forget(name)
        return set(given)

    def _first(self, name: str) -> SavedSession | None:
        """What the first of the ranks has saved of a session; None if nothing is known of it."""
        return next((saved.sessions[name] for saved in self._saved if name in saved.sessions), None)

    def join(self, method: str, world: World, sessions: Mapping[str, SavedSession]) -> Saved:
        """Return what a rank has to save: its sessions, and what still waits for sessions of its own.

        Each rank carries on a part of what another number of ranks has saved, so that all ranks together lose nothing.

        Args:
            method: Spec of the compressor's method.
            world: This rank among those of now.
            sessions: The sessions that have begun, by name.
        """
        own: dict[str, SavedSession] = {}
        carried: list[Saved] = []
        for part in self._saved:
            waiting = {name: session for name, session in part.sessions.items() if name not in sessions}
            if (part.rank, part.size) == (world.rank, world.size):
                own |= waiting
            elif waiting and part.rank % world.size == world.rank:
                carried.append(part._replace(sessions=waiting))
        return Saved(method, world.rank, world.size, {**own, **sessions}, tuple(carried))


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
    sessions = sorted((s.sessions[name] for s in saved if name in s.sessions), key=lambda session: session.rank)
    if len({(session.job, session.steps) for session in sessions}) != 1:
        moments = ", ".join(f"step {session.steps} of job {session.job:x}" for session in sessions)
        raise StateError(f"the states of the ranks do not belong together ({moments}); load those of one save")
    first = sessions[0]
    complete = [session.rank for session in sessions] == list(range(first.size))
    own = [session for session in sessions if (session.rank, session.size) == (world.rank, world.size)]
    alone = len(own) == 1 and (complete or len(sessions) == 1)
    if alone:
        first, sessions = own[0], own
    elif not complete:
        raise StateError(
            f"this state was saved on rank {first.rank} of {first.size} and cannot be restored on rank {world.rank} of"
            f" {world.size}: residuals belong to their rank; give each rank its own state, or the folder with the files"
            " of all ranks to compression.load, which deals them out"
        )
    if any(set(session.buckets) != set(fresh) for session in sessions):
        raise StateError(f"the saved buckets {sorted(first.buckets)} do not fit: the model or merge= has changed")
    buckets: dict[str, Leaves] = {}
    for key, kept in fresh.items():
        expected = kinds(kept.method.init(NumpyOps(), kept.bucket, world.size))
        for session in sessions:
            _check(key, kept.leaves, session.buckets[key], {} if alone else expected)
        formers = [Former(session.buckets[key], session.rank, session.rank % world.size) for session in sessions]
        buckets[key] = (
            first.buckets[key]
            if alone
            else redistribute(kept.leaves, expected, kept.bucket.numel, formers, first.size, world)
        )
    return first._replace(rank=world.rank, size=world.size, buckets=buckets)


def _check(key: str, fresh: Leaves, saved: Leaves, kinds: Mapping[str, Kind]) -> None:
    """Compare saved leaves with those of a new state; what is known to be a rank's part may be of another shape."""
    for path, leaf in fresh.items():
        old, new = np.asarray(leaf), np.asarray(saved.get(path))
        fits = new.dtype == old.dtype and (new.shape == old.shape or kinds.get(path, Kind()).per is Per.PART)
        if not fits:
            raise StateError(
                f"{path!r} of bucket {key!r} does not fit: expected shape {old.shape} and {old.dtype}, got shape"
                f" {new.shape} and {new.dtype}; restore with the model, merge= and method that were saved"
            )
