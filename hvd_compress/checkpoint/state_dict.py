"""Saved states, and how to restore them on each rank, also with another world size."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from hvd_compress.bucketing import Merge, check_merge
from hvd_compress.checkpoint.resharding import Former, Kept, Leaves, redistribute
from hvd_compress.core.collectives import World
from hvd_compress.core.state_tree import OF_PART, Kind, Per, Role, kinds
from hvd_compress.errors import SpecError, StateError
from hvd_compress.ops.numpy import NumpyOps

FORMAT = "hvd_compress/2"

Buckets: TypeAlias = Mapping[str, Leaves]
"""States of a session: leaves by bucket."""


class SavedSession(NamedTuple):
    """Saved states of all buckets of one optimizer on one rank.

    Attributes:
        rank: Rank within the optimizer's process set.
        size: Size of the process set.
        steps: Number of steps; the same on all ranks that saved together.
        buckets: Leaves by bucket.
        merge: Partition of the buckets; None if it was not saved and is that of the session.
        search: Timings of the bucket autotuning so far; None if it has ended.
        job: Job number that the ranks agreed on (see `hvd_compress.checkpoint.agreement.check`). States of the same job
            and step belong together.
        shared: Checksum of leaves that must be equal on all ranks, from `fingerprint`.
        came: How the gradient of each parameter arrived in the first step, if buckets depend on it.
        local_size: Number of ranks on each node.
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
    local_size: int = 1


class Saved(NamedTuple):
    """Saved state of a compressor on one rank.

    Attributes:
        method: Spec string of its method.
        rank: The rank.
        size: World size.
        sessions: States of its optimizers, by name.
        carried: States of another world size that no optimizer has taken over yet; passed on unchanged.
    """

    method: str
    rank: int
    size: int
    sessions: Mapping[str, SavedSession]
    carried: Sequence[Saved] = ()


def fingerprint(buckets: Buckets, kinds: Mapping[str, Mapping[str, Kind]]) -> int:
    """Return a checksum of the leaves that must be equal on all ranks.

    Args:
        buckets: States of a session.
        kinds: Kinds of the leaves by bucket, from `hvd_compress.core.state_tree.kinds`.
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
    """Convert a saved state to dicts, strings, numbers and converted leaves."""
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
        StateError: If ``state`` is not a saved state, or damaged.
    """
    if not isinstance(state, Mapping) or not str(state.get("format")).startswith("hvd_compress/"):
        raise StateError(
            f"this is not a compressor's state: pass what compression.state_dict() returned, a dict with"
            f" format={FORMAT!r}"
        )
    if state["format"] != FORMAT:
        raise StateError(
            f"this state has format={state['format']!r}, but this version of hvd_compress reads {FORMAT!r} only: start"
            " without loading (residuals begin at zero), or load it with the version that saved it"
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
                int(session["local_size"]),
            )
            for name, session in state["sessions"].items()
        }
        carried = tuple(from_dict(part, convert) for part in state["carried"])
        return Saved(str(state["method"]), int(state["rank"]), int(state["size"]), sessions, carried)
    except (AttributeError, KeyError, SpecError, TypeError, ValueError) as error:
        raise StateError(f"this state of a compressor is damaged: {error!r}; load another one") from error


def _partition(merge: Any, search: Any) -> tuple[Merge | None, list[tuple[float, ...]] | None]:
    """Read the partition and the autotuning of a saved session."""
    if merge is not None:
        check_merge(merge)
    return merge, None if search is None else [tuple(map(float, timing)) for timing in search]


class Restorable(Protocol):
    """Interface of sessions: the buckets of one optimizer."""

    @property
    def world(self) -> World:
        """Ranks that it exchanges with."""

    def by_bucket(self, saved: SavedSession | None = None) -> Mapping[str, Kept]:
        """Return the states of all buckets, or initial states for the buckets of a saved state."""

    def restore(self, saved: SavedSession) -> None:
        """Restore states that have been checked."""


class Loaded:
    """Loaded states that wait for their optimizers."""

    def __init__(self) -> None:
        self._saved: list[Saved] = []

    def put(self, saved: Sequence[Saved], method: str) -> None:
        """Replace the waiting states by those of one or all ranks.

        Raises:
            StateError: If they belong to another method. Nothing is changed.
        """
        for one in saved:
            if one.method != method:
                raise StateError(
                    f"this state belongs to {one.method!r}, but the compressor is {method!r}: resume with the"
                    f" method {one.method!r}, or start without loading (residuals begin at zero)"
                )
        self._saved = [part for one in saved for part in (one._replace(carried=()), *one.carried)]

    def names(self) -> set[str]:
        """Return the names of the sessions with waiting states."""
        return {name for saved in self._saved for name in saved.sessions}

    def find(self, name: str, fresh: Mapping[str, Kept], world: World) -> SavedSession | None:
        """Return the waiting state of a session; None if there is none.

        Raises:
            StateError: If it does not match.
        """
        return restored(self._saved, name, fresh, world) if name in self.names() else None

    def forget(self, name: str) -> None:
        """Remove the state of a session that has taken it over."""
        self._saved = [s._replace(sessions={n: v for n, v in s.sessions.items() if n != name}) for s in self._saved]

    def give(self, sessions: Mapping[str, Restorable]) -> set[str]:
        """Restore the waiting states of sessions, all or none, and return the names of the restored ones.

        Raises:
            StateError: If a state does not match.
        """
        found = {name: self.find(name, s.by_bucket(self._first(name)), s.world) for name, s in sessions.items()}
        given = {name: saved for name, saved in found.items() if saved is not None}
        for name, saved in given.items():
            sessions[name].restore(saved)
            self.forget(name)
        return set(given)

    def _first(self, name: str) -> SavedSession | None:
        """Return the waiting state of a session of any one rank; None if there is none."""
        return next((saved.sessions[name] for saved in self._saved if name in saved.sessions), None)

    def join(self, method: str, world: World, sessions: Mapping[str, SavedSession]) -> Saved:
        """Return the state to save: that of the given sessions, and the states that still wait.

        Waiting states of another world size are distributed over the ranks, so that all ranks together keep them.

        Args:
            method: Spec string of the compressor's method.
            world: The current ranks.
            sessions: States of the sessions that have begun, by name.
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
    """Return the state of a session on this rank, made from the saved states of one or all ranks.

    If the world size has changed, each rank inherits from the former ranks that equal its own modulo the current size.

    Args:
        saved: Saved states.
        name: Name of the session.
        fresh: Its buckets with initial states.
        world: The current ranks.

    Raises:
        StateError: If the states belong to another model or rank, or not to one save.
    """
    sessions = sorted((s.sessions[name] for s in saved if name in s.sessions), key=lambda session: session.rank)
    if len({(session.job, session.steps) for session in sessions}) != 1:
        moments = ", ".join(f"step {session.steps} of job {session.job:x}" for session in sessions)
        raise StateError(f"the states of the ranks are of different saves ({moments}): load those of one save")
    first = sessions[0]
    complete = [session.rank for session in sessions] == list(range(first.size))
    own = [session for session in sessions if (session.rank, session.size) == (world.rank, world.size)]
    alone = len(own) == 1 and (complete or len(sessions) == 1)
    if alone:
        first, sessions = own[0], own
    elif not complete:
        raise StateError(
            f"this state was saved on rank {first.rank} of {first.size} and cannot be restored on rank {world.rank} of"
            f" {world.size}, as each rank has its own residual: load the state of the same rank, or pass the folder"
            " with the files of all ranks to compression.load, which reshards them"
        )
    if any(set(session.buckets) != set(fresh) for session in sessions):
        raise StateError(
            f"the saved buckets are {sorted(first.buckets)}, but the model has {sorted(fresh)}: resume with the model"
            " and merge= that were saved"
        )
    buckets: dict[str, Leaves] = {}
    for key, kept in fresh.items():
        expected = kinds(kept.method.init(NumpyOps(), kept.bucket, world))
        for session in sessions:
            same = alone and session.local_size == world.local_size
            _check(key, kept.leaves, session.buckets[key], {} if same else expected)
        formers = [Former(session.buckets[key], session.rank, session.rank % world.size) for session in sessions]
        buckets[key] = (
            _own(first, key, kept, expected, world)
            if alone
            else redistribute(kept.leaves, expected, kept.bucket.numel, formers, first.size, world)
        )
    return first._replace(rank=world.rank, size=world.size, buckets=buckets, local_size=world.local_size)


def _own(saved: SavedSession, key: str, kept: Kept, kinds: Mapping[str, Kind], world: World) -> Leaves:
    """Return the leaves of a bucket of the same rank; what belongs to a part of the bucket, only on the same nodes."""
    if saved.local_size == world.local_size:
        return saved.buckets[key]
    return {path: kept.leaves[path] if kinds[path] == OF_PART else leaf for path, leaf in saved.buckets[key].items()}


def _check(key: str, fresh: Leaves, saved: Leaves, kinds: Mapping[str, Kind]) -> None:
    """Compare saved leaves with those of an initial state; the shapes of shards may differ."""
    for path, leaf in fresh.items():
        old, new = np.asarray(leaf), np.asarray(saved.get(path))
        kind = kinds.get(path, Kind())
        fits = new.dtype == old.dtype and (new.shape == old.shape or kind.per is Per.PART or kind == OF_PART)
        if not fits:
            raise StateError(
                f"{path!r} of bucket {key!r} does not match: expected shape {old.shape} and {old.dtype}, got shape"
                f" {new.shape} and {new.dtype}; resume with the model, merge= and method that were saved"
            )
