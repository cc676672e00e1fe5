"""The reducers of a compressor: which optimizer or model has which, and which one takes over from which."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Set
from itertools import count
from typing import Any

from hvd_compress.errors import UnsupportedError
from hvd_compress.torch.reducer import Reducer


class Registry:
    """The reducers of a compressor.

    Each owner (an optimizer, or a model) has a reducer. The reducers outlive their owners, as long as there are
    parameters that no other reducer has taken over: when they go is then the same on all ranks, whatever their garbage
    collectors do.

    Args:
        in_use: Returns whether an owner reduces gradients now.
        cure: What to do where two owners reduce the same gradients, for the message.
    """

    def __init__(self, in_use: Callable[[Any], bool], cure: str) -> None:
        self._in_use = in_use
        self._cure = cure
        self._all: list[Reducer] = []
        self._of: weakref.WeakKeyDictionary[Any, Reducer] = weakref.WeakKeyDictionary()
        self._numbers: dict[str, count[int]] = {}

    def __iter__(self) -> Iterator[Reducer]:
        self._forget_the_dead()
        return iter(self._all)

    def of(self, owner: Any) -> Reducer | None:
        """Return the reducer of an owner, if it has begun."""
        return self._of.get(owner)

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

    def begin(self, owner: Any, reducer: Reducer) -> None:
        """Add the reducer of an owner; it takes over what other reducers have kept of its parameters.

        Raises:
            UnsupportedError: If another owner reduces gradients of these parameters now.
        """
        keys = reducer.living()
        formers = [other for other in self._all if other.transport == reducer.transport and other.living() & keys]
        for other, former in self._of.items():
            if former in formers and self._in_use(other):
                raise UnsupportedError(
                    "two distributed optimizers or models, an old one and a new one, reduce the gradients of the same"
                    f" parameters: {self._cure}"
                )
        for former in formers:
            if former.waiting:
                former.abort()
        if formers:
            reducer.inherit(formers)
        self._all.append(reducer)
        self._of[owner] = reducer
        self._forget_the_dead()

    def _forget_the_dead(self) -> None:
        self._all = [reducer for reducer in self._all if reducer.living()]
        for owner, reducer in list(self._of.items()):
            if not reducer.living():
                del self._of[owner]
