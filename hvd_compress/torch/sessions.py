"""All sessions of a compressor: whose they are, and which one takes over from which."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Iterator, Set
from itertools import count
from typing import Any

from hvd_compress.errors import UnsupportedError
from hvd_compress.torch import caller
from hvd_compress.torch.session import Session

_LOG = logging.getLogger("hvd_compress")

MANY = 1000
"""Sessions of direct calls at which a program is asked whether it means them."""


class Sessions:
    """The sessions of a compressor.

    An optimizer has a session of its own. The sessions outlive their optimizers, as long as there are parameters that
    no other session has taken over: when they go is then the same on all ranks, whatever their garbage collectors do.
    """

    def __init__(self) -> None:
        self._all: list[Session] = []
        self._of: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()
        self._of_calls: dict[Hashable, Session] = {}
        self._numbers: dict[str, count[int]] = {}
        self._agreed: weakref.WeakKeyDictionary[Any, object] = weakref.WeakKeyDictionary()

    def __iter__(self) -> Iterator[Session]:
        self._forget_the_dead()
        return iter([*self._all, *self._of_calls.values()])

    def of(self, optimizer: Any) -> Session | None:
        """The session of an optimizer, if it has begun."""
        return self._of.get(optimizer)

    def of_call(self, key: Hashable) -> Session | None:
        """The session of a direct call, if it has begun."""
        return self._of_calls.get(key)

    def label(self, label: str, keys: Set[int]) -> str:
        """A label for a new session over some parameters, of which two models may have the same names.

        That of the session that it takes over from, otherwise with the next number. The same on all ranks, as it does
        not depend on what has been collected as garbage.
        """
        for session in self._all:
            if session.label.partition(".")[0] == label and session.living() & keys:
                return session.label
        number = next(self._numbers.setdefault(label, count()))
        return f"{label}.{number}" if number else label

    def begin(self, optimizer: Any, session: Session) -> None:
        """Add the session of an optimizer; it takes over what other sessions have kept of its parameters.

        Raises:
            UnsupportedError: If another optimizer reduces gradients of these parameters now.
        """
        keys = session.living()
        formers = [other for other in self._all if other.group == session.group and other.living() & keys]
        for other, former in self._of.items():
            if former in formers and caller.has_begun(other):
                raise UnsupportedError(
                    "two distributed optimizers, an old one and a new one, reduce the gradients of the same parameters:"
                    f" {caller.CURE}"
                )
        for former in formers:
            if former.waiting:
                former.abort()
        if formers:
            session.inherit(formers)
        self._all.append(session)
        self._of[optimizer] = session
        self._forget_the_dead()

    def begin_call(self, key: Hashable, session: Session) -> None:
        """Add the session of a direct call; it stays, as its name may come again.

        Where names hold the number of the step they never do, so that memory would fill up without a word.
        """
        self._of_calls[key] = session
        if len(self._of_calls) == MANY and session.group.world.rank == 0:
            _LOG.warning(
                "direct calls of hvd.allreduce have had %d names or shapes so far: for each, what was not sent is kept"
                " until the name comes again; take one name per tensor, without the number of the step in it",
                MANY,
            )

    def agreed(self, optimizer: Any) -> bool:
        """Whether the ranks have agreed on what this optimizer compresses, since Horovod was started."""
        return self._agreed.get(optimizer) is caller.incarnation()

    def note_agreement(self, optimizer: Any) -> None:
        """They have."""
        self._agreed[optimizer] = caller.incarnation()

    def _forget_the_dead(self) -> None:
        self._all = [session for session in self._all if session.living()]
        for optimizer, session in list(self._of.items()):
            if not session.living():
                del self._of[optimizer]
