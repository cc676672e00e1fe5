"""Registry of reducers with those of direct calls of ``hvd.allreduce``."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Any

from hvd_compress import direct_calls
from hvd_compress.torch.horovod import caller
from hvd_compress.torch.reducer import Reducer
from hvd_compress.torch.registry import Registry


class CallRegistry(Registry):
    """Reducers of optimizers and of direct calls."""

    def __init__(self) -> None:
        super().__init__(caller.has_begun, caller.CURE)
        self._of_calls: dict[Hashable, Reducer] = {}
        self._names = direct_calls.Names()

    def __iter__(self) -> Iterator[Reducer]:
        return chain(super().__iter__(), self._of_calls.values())

    def of_call(self, key: tuple[Any, ...]) -> Reducer | None:
        """Return the reducer of a direct call, if it has begun."""
        found = self._of_calls.get(key)
        if found is not None and found.steps:
            direct_calls.go_on(key)
            self._names.use(key, found.world.rank)
        return found

    def begin_call(self, key: tuple[Any, ...], reducer: Reducer) -> None:
        """Add the reducer of a direct call, which is kept for the next call with its name."""
        self._of_calls[key] = reducer
        rank = reducer.world.rank
        direct_calls.begin(key, f"hvd.allreduce(name={key[0]!r})", rank)
        dropped = self._names.use(key, rank)
        if dropped is not None:
            del self._of_calls[dropped]
