"""Succession of sessions: which one takes over the state of another.

When a layer is unfrozen, gradients come for another list of variables, and there is a new session. The graph of the old
one may still be called, as where two lists take turns, so the old session stays. What counts once, such as a residual,
moves to the new session; the old one begins anew with that part. So nothing is lost and nothing is sent twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import count
from typing import Any

import numpy as np

from hvd_compress.checkpoint.resharding import BucketSnapshot, inherit
from hvd_compress.core.state_tree import Kind, Per, Role, flatten
from hvd_compress.tensorflow.session import Session


class Lineage:
    """The sessions of a compressor, and whose variables are theirs: those that no later session has."""

    def __init__(self) -> None:
        self._sessions: list[tuple[Session, list[int]]] = []  # the latest first
        self._numbers: dict[Hashable, int] = {}
        self._next = count()

    def has_any(self, names: Sequence[Hashable]) -> bool:
        """Return whether a session has any of these variables."""
        return bool(self._numbers.keys() & set(names))

    def add(self, heir: Session, names: Sequence[Hashable], fresh: bool) -> None:
        """Add a session, which takes over what earlier ones of the same ranks kept.

        Args:
            heir: The new session.
            names: Identities of its variables.
            fresh: Whether its state is new: what a checkpoint has restored is complete.
        """
        numbers = [self._numbers.setdefault(name, next(self._next)) for name in names]
        related = [pair for pair in self._sessions if _same_ranks(pair[0], heir) and set(pair[1]) & set(numbers)]
        if fresh and related:
            _hand_over(heir, numbers, related)
        for _, earlier in related:
            earlier[:] = [next(self._next) if number in numbers else number for number in earlier]
        self._sessions.insert(0, (heir, numbers))

    def drop(self, session: Session) -> None:
        """Forget a session."""
        self._sessions = [pair for pair in self._sessions if pair[0] is not session]


def _hand_over(heir: Session, numbers: list[int], related: list[tuple[Session, list[int]]]) -> None:
    """Move what the new session goes on with."""
    formers = [session.kept(earlier) for session, earlier in related]
    heirs = heir.kept(numbers)
    every = [former for buckets in formers for former in buckets]
    heir.write({kept.bucket.key: inherit(kept, every) for kept in heirs})
    heir.tune(next((session.search for session, _ in related if session.search), ()))
    for (session, _), buckets in zip(related, formers, strict=True):
        fresh = dict(zip((b.bucket.key for b in buckets), map(flatten, session.initial()), strict=True))
        kinds = session.kinds()
        session.write({b.bucket.key: _rest(b, heirs, fresh[b.bucket.key], kinds[b.bucket.key]) for b in buckets})


def _rest(
    former: BucketSnapshot, heirs: Sequence[BucketSnapshot], fresh: Any, kinds: dict[str, Kind]
) -> dict[str, Any]:
    """Return the state that a bucket keeps when others inherit from it: shared leaves, and those not theirs."""
    whole = any(tuple(h.names) == tuple(former.names) for h in heirs)
    taken = np.repeat([any(name in h.names for h in heirs) for name in former.names], former.bucket.sizes)

    def rest(path: str, leaf: Any) -> Any:
        if kinds[path].role in (Role.SHARED, Role.MEASURED):
            return leaf
        if kinds[path].per is Per.COORDINATE:
            return np.where(taken, fresh[path], leaf)
        return fresh[path] if whole else leaf

    return {path: rest(path, leaf) for path, leaf in former.leaves.items()}


def _same_ranks(a: Session, b: Session) -> bool:
    return a.transport.epoch == b.transport.epoch
