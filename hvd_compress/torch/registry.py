"""Registry of a compressor's reducers: their owners, and which reducer succeeds which."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Set
from itertools import count
from typing import Any

from hvd_compress.errors import UnsupportedError
from hvd_compress.torch.reducer import Reducer


class Registry:
    """Reducers of a compressor, one per owner: an optimizer or a model.

    A reducer outlives its owner while any of its parameters exists that no other reducer has taken over. So it is
    removed at the same time on all ranks, independent of garbage collection.

    Args:
        in_use: Function that returns whether an owner is reducing gradients.
        cure: Cure for two owners that reduce the same gradients, for the error message.
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
        """Return the label of a new reducer, which is unique even if two models have the same parameter names.

        It is that of the predecessor, or else gets the next number. It does not depend on garbage collection, so it is
        the same on all ranks.
        """
        for reducer in self._all:
            if reducer.label.partition(".")[0] == label and reducer.living() & keys:
                return reducer.label
        number = next(self._numbers.setdefault(label, count()))
        return f"{label}.{number}" if number else label

    def begin(self, owner: Any, reducer: Reducer) -> None:
        """Add the reducer of an owner; it takes over the state of its parameters from other reducers.

        Raises:
            UnsupportedError: If another owner is reducing gradients of these parameters.
        """
        keys = reducer.living()
        formers = [other for other in self._all if other.living() & keys]
        for other, former in self._of.items():
            if former in formers and self._in_use(other):
                raise UnsupportedError(
                    "two distributed optimizers or models, an old and a new one, reduce gradients of the same"
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
