"""Registry of reducers with those of direct calls, as of ``hvd.allreduce``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from typing import Any

from hvd_compress.engine import direct_calls
from hvd_compress.torch.reducer import Reducer
from hvd_compress.torch.registry import Registry


class CallRegistry(Registry):
    """Reducers of optimizers or models, and of direct calls.

    Args:
        in_use: See `Registry`.
        cure: See `Registry`.
        function: The function that is called, for messages.
    """

    def __init__(self, in_use: Callable[[Any], bool], cure: str, function: str) -> None:
        super().__init__(in_use, cure)
        self._function = function
        self._of_calls: dict[Hashable, Reducer] = {}
        self._names = direct_calls.Names(function)

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
        direct_calls.begin(key, f"{self._function}(name={key[0]!r})", rank)
        dropped = self._names.use(key, rank)
        if dropped is not None:
            del self._of_calls[dropped]
