"""The reducers of direct calls of ``hvd.allreduce``, beside those of optimizers."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from itertools import chain

from hvd_compress.torch.horovod import caller
from hvd_compress.torch.reducer import Reducer
from hvd_compress.torch.registry import Registry

_LOG = logging.getLogger("hvd_compress")

MANY = 1000
"""Reducers of direct calls at which a program is asked whether it means them."""


class CallRegistry(Registry):
    """The reducers of a compressor that Horovod calls."""

    def __init__(self) -> None:
        super().__init__(caller.has_begun, caller.CURE)
        self._of_calls: dict[Hashable, Reducer] = {}

    def __iter__(self) -> Iterator[Reducer]:
        return chain(super().__iter__(), self._of_calls.values())

    def of_call(self, key: Hashable) -> Reducer | None:
        """The reducer of a direct call, if it has begun."""
        return self._of_calls.get(key)

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
