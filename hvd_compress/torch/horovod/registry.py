"""Registry of a compressor's reducers: their optimizers, and which reducer succeeds which."""

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
"""Number of reducers of direct calls at which a warning is logged."""


class Registry:
    """Reducers of a compressor, one per optimizer.

    A reducer outlives its optimizer while any of its parameters exists that no other reducer has taken over. So it is
    removed at the same time on all ranks, independent of garbage collection.
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
        """Return the reducer of an optimizer, if it has begun."""
        return self._of.get(optimizer)

    def of_call(self, key: Hashable) -> Reducer | None:
        """Return the reducer of a direct call, if it has begun."""
        return self._of_calls.get(key)

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

    def begin(self, optimizer: Any, reducer: Reducer) -> None:
        """Add the reducer of an optimizer; it takes over the state of its parameters from other reducers.

        Raises:
            UnsupportedError: If another optimizer is reducing gradients of these parameters.
        """
        keys = reducer.living()
        formers = [other for other in self._all if other.transport == reducer.transport and other.living() & keys]
        for other, former in self._of.items():
            if former in formers and caller.has_begun(other):
                raise UnsupportedError(
                    f"two distributed optimizers, an old and a new one, reduce gradients of the same parameters:"
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
        """Add the reducer of a direct call, which is kept for the next call with its name.

        Names that contain the number of the step never repeat and fill the memory, so many names cause a warning.
        """
        self._of_calls[key] = reducer
        if len(self._of_calls) == MANY and reducer.world.rank == 0:
            _LOG.warning(
                "direct calls of hvd.allreduce have used %d names or shapes so far, and a residual is kept for each:"
                " use one name per tensor, without the number of the step in it",
                MANY,
            )

    def agreed(self, optimizer: Any) -> bool:
        """Return whether the ranks have verified this optimizer since Horovod was started."""
        return self._agreed.get(optimizer) == caller.incarnation()

    def note_agreement(self, optimizer: Any) -> None:
        """Record that the ranks have verified this optimizer."""
        self._agreed[optimizer] = caller.incarnation()

    def _forget_the_dead(self) -> None:
        self._all = [reducer for reducer in self._all if reducer.living()]
        for optimizer, reducer in list(self._of.items()):
            if not reducer.living():
                del self._of[optimizer]
