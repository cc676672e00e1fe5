"""The base class of what averages models: the parameters of a rank, agreement with the others, and the saved state."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from hvd_compress.checkpoint import agreement
from hvd_compress.checkpoint.saving import SaveLoadMixin
from hvd_compress.checkpoint.state_dict import Saved, SavedSession, fingerprint
from hvd_compress.core.bucketing import Gradient
from hvd_compress.core.collectives import AllGather, Broadcast, Collective, World
from hvd_compress.core.state_tree import Kind
from hvd_compress.errors import StateError, UnsupportedError
from hvd_compress.transport.protocol import Transport


class Flight(Protocol):
    """An exchange on its way."""

    def advance(self) -> None:
        """Advance it without waiting."""

    def wait(self) -> Sequence[Any]:
        """Wait for the sums or means over the ranks, and return them."""


class Over(NamedTuple):
    """An exchange that was over when it had been started."""

    result: Sequence[Any]

    def advance(self) -> None:
        """Do nothing."""

    def wait(self) -> Sequence[Any]:
        """Return the result."""
        return self.result


class Stepper(SaveLoadMixin, ABC):
    """Averages models in place of gradients.

    All ranks make it together, and begin with the parameters of the first one.

    Args:
        settings: The settings, a dataclass with a field ``compression``.
        compression: Compresses what is exchanged.
        transport: Transport of the ranks.
        label: Name that is the same on all ranks, and another one for each model.
        members: The ranks, as the job numbers them; empty for all.
    """

    _kind: ClassVar[str]
    """Prefix of labels."""
    _before: ClassVar[bool]
    """Whether to run before each step of the optimizer; otherwise after it."""

    def __init__(
        self, settings: Any, compression: Any, transport: Transport, label: str, members: Sequence[int] = ()
    ) -> None:
        self.settings = settings
        self._compression, self._transport, self._members = compression, transport, members
        everyone = tuple(members) in ((), tuple(range(self._world().size)))
        self._label = label
        self._session = label if everyone else f"{label}.{zlib.crc32(repr(tuple(members)).encode()):08x}"
        self._job = self._agree()
        arrays = self._arrays()
        first = [self._perform(Broadcast(array, root=0), str(number)) for number, array in enumerate(arrays)]
        self._write(range(len(arrays)), first)

    @abstractmethod
    def _step(self) -> None:
        """Do what is due before or after a step of the optimizer."""

    @abstractmethod
    def finish(self) -> None:
        """Average models at the end of training, so that all ranks have the same one.

        Call it on all ranks, after the same step.
        """

    @abstractmethod
    def _arrays(self) -> Sequence[Any]:
        """Return the parameters of this rank, or its shards of them."""

    @abstractmethod
    def _write(self, numbers: Sequence[int], arrays: Sequence[Any]) -> None:
        """Replace the values of some parameters, by their numbers."""

    @abstractmethod
    def _kept(self) -> tuple[int, dict[str, Any]]:
        """Return the number of steps so far, and the arrays to be saved besides those of the compression, by name."""

    @abstractmethod
    def _check(self, saved: SavedSession) -> None:
        """Refuse a saved state of other parameters or settings.

        Raises:
            StateError: If it is one.
        """

    @abstractmethod
    def _restore(self, saved: SavedSession) -> None:
        """Take over a saved state that has been checked."""

    def _array(self, values: Any, like: Any = None) -> Any:
        """Return a copy of a numpy array as one of the framework, by default numpy.

        Args:
            values: The array.
            like: An array whose dtype and device it is to have; None for its own dtype, on the CPU.
        """
        return np.array(values, None if like is None else like.dtype)

    def _numpy(self, array: Any) -> Any:
        """Return a copy in numpy."""
        return np.array(array)

    def _perform(self, message: Collective, name: str) -> Any:
        return self._transport.start(message, f"hvd_compress.{self._label}.{name}").result()

    def _agree(self) -> int:
        """Make sure that the ranks have the same settings and parameters; return their job number."""
        method, merge = self._compression.method, self._compression.merge
        if method.preconditioned:
            raise UnsupportedError(
                f"{type(self).__name__} is not supported with {method}, which delivers updates: leave out"
                " preconditioned=on"
            )
        arrays = [(tuple(array.shape), str(array.dtype)) for array in self._arrays()]
        gradients = [Gradient(str(number), *one) for number, one in enumerate(arrays)]
        settings = repr(replace(self.settings, compression=""))
        facts = agreement.describe(method, merge, gradients, self._transport.world, settings=settings)
        told = self._perform(AllGather(self._array(np.frombuffer(facts, np.uint8)), ragged=True), "facts")
        return agreement.check(bytes(self._numpy(told)))

    def _finite(self, arrays: Sequence[Any]) -> bool:
        """Return whether all values are finite."""
        return all(np.isfinite(self._numpy((array - array).sum())) for array in arrays)

    @contextmanager
    def _in_place(self, arrays: Sequence[Any]) -> Iterator[None]:
        """Put arrays in the place of this rank's parameters within the context."""
        own = deepcopy(list(self._arrays()))
        self._write(range(len(own)), arrays)
        try:
            yield
        finally:
            self._write(range(len(own)), own)

    def _settle(self) -> None:
        """Wait for an exchange on its way, if there can be any."""

    def stats(self) -> Any:
        """Return bytes and times of this rank so far; an exchange counts as a step."""
        return self._compression.stats()

    def _world(self) -> World:
        world: World = self._compression._world()
        return world

    def _saved(self) -> Saved:
        self._settle()
        steps, kept = self._kept()
        arrays = {name: self._numpy(array) for name, array in kept.items()}
        shared = fingerprint({"": arrays}, {"": dict.fromkeys(arrays, Kind())})
        world = self._transport.world
        session = SavedSession(
            world.rank, world.size, steps, {"": arrays}, job=self._job, shared=shared, process_set=self._members
        )
        saved: Saved = self._compression._saved()
        return saved._replace(sessions={**saved.sessions, self._session: session})

    def _load(self, saved: list[Saved]) -> None:
        found = [one.sessions[self._session] for one in saved if self._session in one.sessions]
        if not found:
            raise StateError(
                f"the loaded state has none of {type(self).__name__} on these ranks: pass what its state_dict()"
                " returned on them, or what its save() wrote"
            )
        self._check(found[0])
        rest = [one._replace(sessions={k: v for k, v in one.sessions.items() if k != self._session}) for one in saved]
        self._compression._load(rest)
        self._settle()
        self._restore(found[0])
        self._job = found[0].job
