"""Registry of reducers with those of direct calls of ``hvd.allreduce``."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from itertools import chain

from hvd_compress.torch.horovod import caller
from hvd_compress.torch.reducer import Reducer
from hvd_compress.torch.registry import Registry

_LOG = logging.getLogger("hvd_compress")

MANY = 1000
"""Number of reducers of direct calls at which a warning is logged."""


class CallRegistry(Registry):
    """Reducers of optimizers and of direct calls."""

    def __init__(self) -> None:
        super().__init__(caller.has_begun, caller.CURE)
        self._of_calls: dict[Hashable, Reducer] = {}

    def __iter__(self) -> Iterator[Reducer]:
        return chain(super().__iter__(), self._of_calls.values())

    def of_call(self, key: Hashable) -> Reducer | None:
        """Return the reducer of a direct call, if it has begun."""
        return self._of_calls.get(key)

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
