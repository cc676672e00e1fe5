"""All reducers of a compressor: whose they are, and which one takes over from which."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Iterator, Set
from itertools import count
from typing import Any

from hvd_compress.errors import UnsupportedError
from hvd_compress.torch.horovod import caller
from hvd_compress.torch.reducer import Reducer

_LOG = logging.getLogger("hvd_compress")

MANY = 1000
"""Reducers of direct calls at which a program is asked whether it means them."""


class Registry:
    """The reducers of a compressor.

    An optimizer has a reducer of its own. The reducers outlive their optimizers, as long as there are parameters that
    no other reducer has taken over: when they go is then the same on all ranks, whatever their garbage collectors do.
    """

    def __init__(self) -> None:
        self._all: list[Reducer] = []
        self._of: weakref.WeakKeyDictionary[Any, Reducer] = weakref.WeakKeyDictionary()
        self._of_calls: dict[Hashable, Reducer] = {}
        self._numbers: dict[str, count[int]] = {}
        self._agreed: weakref.WeakKeyDictionary[Any, object] = weakref.WeakKeyDictionary()

    def __iter__(self) -> Iterator[Reducer]:
        self._forget_the_dead()
        return iter([*self._all, *self._of_calls.values()])

    def of(self, optimizer: Any) -> Reducer | None:
        """The reducer of an optimizer, if it has begun."""
        return self._of.get(optimizer)

    def of_call(self, key: Hashable) -> Reducer | None:
        """The reducer of a direct call, if it has begun."""
        return self._of_calls.get(key)

    def label(self, label: str, keys: Set[int]) -> str:
        """A label for a new reducer over some parameters, of which two models may have the same names.

        That of the reducer that it takes over from, otherwise with the next number. The same on all ranks, as it does
        not depend on what has been collected as garbage.
        """
        for reducer in self._all:
            if reducer.label.partition(".")[0] == label and reducer.living() & keys:
                return reducer.label
        number = next(self._numbers.setdefault(label, count()))
        return f"{label}.{number}" if number else label

    def begin(self, optimizer: Any, reducer: Reducer) -> None:
        """Add the reducer of an optimizer; it takes over what other reducers have kept of its parameters.

        Raises:
            UnsupportedError: If another optimizer reduces gradients of these parameters now.
        """
        keys = reducer.living()
        formers = [other for other in self._all if other.transport == reducer.transport and other.living() & keys]
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
            reducer.inherit(formers)
        self._all.append(reducer)
        self._of[optimizer] = reducer
        self._forget_the_dead()

    def begin_call(self, key: Hashable, reducer: Reducer) -> None:
        """Add the reducer of a direct call; it stays, as its name may come again.

        Where names hold the number of the step they never do, so that memory would fill up without a word.
        """
        self._of_calls[key] = reducer
        if len(self._of_calls) == MANY and reducer.world.rank == 0:
            _LOG.warning(
                "direct calls of hvd.allreduce have had %d names or shapes so far: for each, what was not sent is kept"
                " until the name comes again; take one name per tensor, without the number of the step in it",
                MANY,
            )

    def agreed(self, optimizer: Any) -> bool:
        """Whether the ranks have agreed on what this optimizer compresses, since Horovod was started."""
        return self._agreed.get(optimizer) == caller.incarnation()

    def note_agreement(self, optimizer: Any) -> None:
        """They have."""
        self._agreed[optimizer] = caller.incarnation()

    def _forget_the_dead(self) -> None:
        self._all = [reducer for reducer in self._all if reducer.living()]
        for optimizer, reducer in list(self._of.items()):
            if not reducer.living():
                del self._of[optimizer]
