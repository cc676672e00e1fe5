"""Saved states, and how to restore them on each rank, also with another world size."""

from __future__ import annotations

import logging
import math
import operator
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import numpy as np

from hvd_compress.checkpoint.agreement import unwrapped
from hvd_compress.checkpoint.resharding import BucketSnapshot, Former, Leaves, redistribute
from hvd_compress.core.bucketing import PRECISION, Gradient, Merge, check_merge
from hvd_compress.core.collectives import World
from hvd_compress.core.state_tree import Kind, Per, Role, kinds
from hvd_compress.errors import SpecError, StateError
from hvd_compress.ops.numpy import NumpyOps

FORMAT = "hvd_compress/3"

_LOG = logging.getLogger("hvd_compress")

Buckets: TypeAlias = Mapping[str, Leaves]
"""States of a session: leaves by bucket."""

Parameter: TypeAlias = tuple[str, tuple[int, ...]]
"""Name, without what wrappers add to it, and shape."""


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
        gradients: Its parameters; empty if they are known by the session's name alone, as in direct calls.
        process_set: Ranks of the process set, as the job numbers them; empty for all ranks.
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
    gradients: Sequence[Gradient] = ()
    process_set: Sequence[int] = ()

    @property
    def members(self) -> Sequence[int]:
        """Ranks of the process set, as the job numbers them."""
        return self.process_set or range(self.size)


class Saved(NamedTuple):
    """Saved state of a compressor on one rank.

    Attributes:
        method: Spec string of its method.
        rank: The rank.
        size: World size.
        sessions: States of its optimizers, by name.
        carried: States of another world size that no optimizer has taken over yet; passed on unchanged.
        step: Step of the training, as the user counts; None if it was not given.
    """

    method: str
    rank: int
    size: int
    sessions: Mapping[str, SavedSession]
    carried: Sequence[Saved] = ()
    step: int | None = None


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
            "gradients": [[g.name, list(g.shape), g.dtype, g.device] for g in session.gradients],
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
                _whole(session["rank"]),
                _whole(session["size"], least=1),
                _whole(session["steps"]),
                {
                    str(key): {str(path): convert(leaf) for path, leaf in leaves.items()}
                    for key, leaves in session["buckets"].items()
                },
                *_partition(session.get("merge"), session.get("search")),
                _whole(session["job"]),
                _whole(session["shared"]),
                None if session["came"] is None else [_whole(one, most=2) for one in session["came"]],
                _whole(session["local_size"], least=1),
                tuple(_parameter(*one) for one in session["gradients"]),
                tuple(map(_whole, session["process_set"])),
            )
            for name, session in state["sessions"].items()
        }
        for one in sessions.values():
            if one.came is not None and one.gradients and len(one.came) != len(one.gradients):
                raise ValueError(f"{len(one.came)} arrivals of {len(one.gradients)} gradients")
        carried = tuple(from_dict(part, convert) for part in state["carried"])
        step = None if state["step"] is None else _whole(state["step"])
        return Saved(
            str(state["method"]), _whole(state["rank"]), _whole(state["size"], least=1), sessions, carried, step
        )
    except (AttributeError, KeyError, OverflowError, SpecError, TypeError, ValueError) as error:
        raise StateError(f"this state of a compressor is damaged: {error!r}; load another one") from error


def _partition(merge: Any, search: Any) -> tuple[Merge | None, list[tuple[float, ...]] | None]:
    """Read the partition and the autotuning of a saved session."""
    if merge is not None:
        check_merge(merge)
    return merge, None if search is None else [_timing(*timing) for timing in search]


def _timing(seconds: Any, spread: Any) -> tuple[float, float]:
    """Read a timing; infinite seconds are those of a candidate without steps left."""
    if not (seconds >= 0 and 0 <= spread < math.inf):
        raise ValueError(f"a step of {seconds} s within {spread} s")
    return float(seconds), float(spread)


def _whole(number: Any, least: int = 0, most: int = 2**63 - 1) -> int:
    """Read a whole number."""
    if not least <= operator.index(number) <= most:
        raise ValueError(f"{number} is not in {least} .. {most}")
    return operator.index(number)


def _parameter(name: Any, shape: Any, dtype: Any, device: Any) -> Gradient:
    """Read the description of a gradient."""
    if dtype not in PRECISION.values():
        raise ValueError(f"{dtype!r} is no dtype of a gradient")
    return Gradient(str(name), tuple(map(_whole, shape)), dtype, str(device))


class Restorable(Protocol):
    """Interface of sessions: the buckets of one optimizer."""

    @property
    def world(self) -> World:
        """Ranks that it exchanges with."""

    @property
    def gradients(self) -> Sequence[Gradient]:
        """Its parameters; empty if its name alone tells whose states are its own."""

    def by_bucket(self, saved: SavedSession | None = None) -> Mapping[str, BucketSnapshot]:
        """Return the states of all buckets, or initial states for the buckets of a saved state.

        Raises:
            StateError: If the saved state has other parameters or buckets, and cannot be restored.
        """

    def restore(self, saved: SavedSession) -> None:
        """Restore states that have been checked; if they are of other parameters, those that both have."""


class PendingStates:
    """Loaded states that wait for their optimizers."""

    def __init__(self) -> None:
        self._saved: list[Saved] = []
        self._taken: dict[str, set[Parameter]] = {}

    def put(self, saved: Sequence[Saved], method: str) -> None:
        """Replace the waiting states by those of one or all ranks.

        Raises:
            StateError: If they belong to another method. Nothing is changed.
        """
        for one in saved:
            if one.method != method:
                raise StateError(
                    f"this state belongs to {one.method!r}, but the compressor is {method!r}: resume with the method"
                    f" {one.method!r}, or start without loading (residuals begin at zero)"
                )
        self._saved = [part for one in saved for part in (one._replace(carried=()), *one.carried)]

    def names(self) -> set[str]:
        """Return the names of the sessions with waiting states."""
        return {name for saved in self._saved for name in saved.sessions} - self._taken.keys()

    def find(self, name: str, fresh: Mapping[str, BucketSnapshot], world: World) -> SavedSession | None:
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

        A session without a state of its own gets one with most of its parameters: its model has a layer more, or its
        parameters were divided among optimizers in another way.

        Raises:
            StateError: If a state does not match, or a state and a session are left that have no parameter in common.
        """
        source = {name: name for name in self.names() & sessions.keys()}
        others = {name: self._related(s, source) for name, s in sessions.items() if name not in source and s.gradients}
        related = {name: other for name, other in others.items() if other}
        self._check_left({*source, *related.values()}, [sessions[name] for name in others.keys() - related.keys()])
        found = {name: self._found(other, sessions[name]) for name, other in (source | related).items()}
        for name, saved in found.items():
            sessions[name].restore(saved)
            if name in related:
                self._note_taken(related[name], sessions[name])
            else:
                self.forget(name)
        return set(found)

    def _related(self, session: Restorable, owned: Collection[str]) -> str:
        """Return the name of the state with most parameters of a session; empty if none has half of them or its own."""
        mine, counts = set(parameters_of(session.gradients)), {"": 0}
        for name in sorted(self._taken.keys() | self.names() - set(owned)):
            theirs = set(parameters_of(self._first(name).gradients)) - self._taken.get(name, set())
            if self._first(name).merge is not None and 2 * len(mine & theirs) >= min(len(mine), len(theirs)):
                counts[name] = len(mine & theirs)
        return max(counts, key=counts.__getitem__)

    def _check_left(self, claimed: Collection[str], strangers: Sequence[Restorable]) -> None:
        """Refuse a session that finds nothing while there are states that nobody claims."""
        left = [one for name in sorted(self.names() - set(claimed)) if (one := self._first(name)).gradients]
        if left and strangers:
            refuse_other_parameters(left[0].gradients, strangers[0].gradients)

    def _found(self, name: str, session: Restorable) -> SavedSession:
        """Return a waiting state as it is on this rank."""
        return restored(self._saved, name, session.by_bucket(self._first(name)), session.world)

    def _note_taken(self, name: str, session: Restorable) -> None:
        """Note which parameters of a state have found a session, and warn of those of the session that have not."""
        mine, theirs = parameters_of(session.gradients), set(parameters_of(self._first(name).gradients))
        self._taken[name] = self._taken.get(name, set()) | (theirs & set(mine))
        new = [one.name for one, this in zip(session.gradients, mine, strict=True) if this not in theirs]
        if new and session.world.rank == 0:
            _LOG.warning(
                "the loaded state has nothing for %d of %d parameters, whose residuals begin at zero: %s",
                len(new),
                len(mine),
                ", ".join(map(repr, new[:5])) + (", ..." if len(new) > 5 else ""),
            )

    def _first(self, name: str) -> SavedSession:
        """Return the waiting state of a session of any one rank."""
        return next(saved.sessions[name] for saved in self._saved if name in saved.sessions)

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
            waiting = {n: one for n, one in part.sessions.items() if n not in sessions and n not in self._taken}
            if (part.rank, part.size) == (world.rank, world.size):
                own |= waiting
            elif waiting and part.rank % world.size == world.rank:
                carried.append(part._replace(sessions=waiting))
        return Saved(method, world.rank, world.size, {**own, **sessions}, tuple(carried))


def parameters_of(gradients: Sequence[Gradient]) -> list[Parameter]:
    """Return what tells parameters apart, in their order."""
    names = unwrapped(one.name for one in gradients)
    return [(name, tuple(one.shape)) for name, one in zip(names, gradients, strict=True)]


def refuse_other_parameters(saved: Sequence[Gradient], own: Sequence[Gradient]) -> NoReturn:
    """Reject a state of other parameters than those of an optimizer or model.

    Raises:
        StateError: Always.
    """
    raise StateError(
        f"the loaded state is of {_some(saved)}, but the model has {_some(own)}: resume with the model that was saved,"
        " give a model that is new a compression object of its own, or start without loading (residuals begin at zero)"
    )


def same_parameters(saved: SavedSession, own: Sequence[Gradient]) -> bool:
    """Return whether a saved session has the parameters of a session, in the same order."""
    return not saved.gradients or parameters_of(saved.gradients) == parameters_of(own)


def _some(gradients: Sequence[Gradient]) -> str:
    """Describe a list of parameters by the first few."""
    names = ", ".join(f"{one.name!r} {tuple(one.shape)}" for one in gradients[:3])
    return f"{len(gradients)} parameters ({names}{', ...' if len(gradients) > 3 else ''})"


def restored(saved: Sequence[Saved], name: str, fresh: Mapping[str, BucketSnapshot], world: World) -> SavedSession:
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


def _own(saved: SavedSession, key: str, kept: BucketSnapshot, kinds: Mapping[str, Kind], world: World) -> Leaves:
    """Return the leaves of a bucket of the same rank; what belongs to a part of the bucket, only on the same nodes."""
    if saved.local_size == world.local_size:
        return saved.buckets[key]
    return {path: kept.leaves[path] if kinds[path].within else leaf for path, leaf in saved.buckets[key].items()}


def _check(key: str, fresh: Leaves, saved: Leaves, kinds: Mapping[str, Kind]) -> None:
    """Compare saved leaves with those of an initial state; the shapes of shards may differ."""
    for path, leaf in fresh.items():
        old, new = np.asarray(leaf), np.asarray(saved.get(path))
        kind = kinds.get(path, Kind())
        fits = new.dtype == old.dtype and (new.shape == old.shape or kind.per is Per.PART or kind.within)
        if not fits:
            raise StateError(
                f"{path!r} of bucket {key!r} does not match: expected shape {old.shape} and {old.dtype}, got shape"
                f" {new.shape} and {new.dtype}; resume with the model, merge= and method that were saved"
            )
        if new.dtype.kind == "f" and not np.isfinite(new).all() and np.isfinite(old).all():
            raise StateError(
                f"{path!r} of bucket {key!r} has {np.count_nonzero(~np.isfinite(new))} of {new.size} numbers that are"
                " not finite, which would spoil all later steps: load an older save, or start without loading"
                " (residuals begin at zero)"
            )
