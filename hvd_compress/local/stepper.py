"""The base class of the adapters' `LocalSteps`: exchanges fragments when they are due, saves and loads the state."""

from __future__ import annotations

import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvd_compress.checkpoint import agreement
from hvd_compress.checkpoint.saving import SaveLoadMixin
from hvd_compress.checkpoint.state_dict import Saved, SavedSession, fingerprint
from hvd_compress.core.bucketing import Gradient
from hvd_compress.core.collectives import AllGather, AllReduce, Broadcast, Collective, World
from hvd_compress.core.state_tree import Kind
from hvd_compress.errors import DisagreementError, StateError, UnsupportedError
from hvd_compress.local.rounds import Rounds
from hvd_compress.local.settings import LocalSettings
from hvd_compress.transport.protocol import Handle, Transport

_LOG = logging.getLogger("hvd_compress")


class Flight(Protocol):
    """An exchange on its way."""

    def advance(self) -> None:
        """Advance it without waiting."""

    def wait(self) -> Sequence[Any]:
        """Wait for the means over the ranks, and return them."""


class Over(NamedTuple):
    """An exchange that was over when it had been started."""

    means: Sequence[Any]

    def advance(self) -> None:
        """Do nothing."""

    def wait(self) -> Sequence[Any]:
        """Return the means."""
        return self.means


class LocalStepper(SaveLoadMixin, ABC):
    """Averages the models of the ranks every few steps, in place of gradients in each.

    All ranks make it together, and begin with the parameters of the first one.

    Args:
        settings: The settings.
        compression: Compresses the differences.
        transport: Transport of the ranks.
        label: Name that is the same on all ranks, and another one for each model.
        members: The ranks, as the job numbers them; empty for all.
    """

    def __init__(
        self, settings: LocalSettings, compression: Any, transport: Transport, label: str, members: Sequence[int] = ()
    ) -> None:
        self.settings = settings
        self._compression, self._transport, self._members = compression, transport, members
        everyone = tuple(members) in ((), tuple(range(self._world().size)))
        self._label = label
        self._session = label if everyone else f"{label}.{zlib.crc32(repr(tuple(members)).encode()):08x}"
        self._flight: tuple[Flight, Handle] | None = None
        self._job = self._agree()
        arrays = self._arrays()
        first = [self._perform(Broadcast(array, root=0), str(number)) for number, array in enumerate(arrays)]
        self._write(range(len(arrays)), first)
        self._rounds = Rounds(settings, self._arrays())

    @abstractmethod
    def _arrays(self) -> Sequence[Any]:
        """Return the parameters of this rank, or its shards of them."""

    @abstractmethod
    def _write(self, numbers: Sequence[int], arrays: Sequence[Any]) -> None:
        """Replace the values of some parameters, by their numbers."""

    @abstractmethod
    def _start(self, arrays: Sequence[Any], name: str) -> Flight:
        """Start to average arrays, which are not needed any more."""

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

    def __repr__(self) -> str:
        return f"{type(self).__name__}(step={self._rounds.step}, {self.settings!r})"

    def _perform(self, message: Collective, name: str) -> Any:
        return self._transport.start(message, f"hvd_compress.{self._label}.{name}").result()

    def _agree(self) -> int:
        """Make sure that the ranks have the same settings and parameters; return their job number."""
        method, merge = self._compression.method, self._compression.merge
        if method.preconditioned:
            raise UnsupportedError(
                f"LocalSteps is not supported with {method}, which delivers updates: leave out preconditioned=on"
            )
        arrays = [(tuple(array.shape), str(array.dtype)) for array in self._arrays()]
        gradients = [Gradient(str(number), *one) for number, one in enumerate(arrays)]
        settings = repr(replace(self.settings, compression=""))
        facts = agreement.describe(method, merge, gradients, self._transport.world, settings=settings)
        told = self._perform(AllGather(self._array(np.frombuffer(facts, np.uint8)), ragged=True), "facts")
        return agreement.check(bytes(self._numpy(told)))

    def _step(self) -> None:
        """Do what is due after a step."""
        rounds = self._rounds
        rounds.step += 1
        begins, ends = self.settings.begins(rounds.step), self.settings.ends(rounds.step)
        if begins is not None:
            self._begin(begins)
        elif self._flight is not None:
            self._flight[0].advance()
        if ends is not None:
            self._end(ends, self.settings.mix)

    def _begin(self, fragment: int) -> None:
        moment = self._rounds.step, self._job
        told = AllReduce(self._array(np.array([*moment, *(-one for one in moment)])), "max")
        self._compression._meter.count(told)
        moments = self._transport.start(told, f"hvd_compress.{self._label}.moment")
        differences = self._rounds.differences(fragment, self._arrays())
        self._flight = self._start(differences, f"{self._label}.{fragment}"), moments

    def _come(self) -> Sequence[Any] | None:
        """Wait for the exchange on its way, if any; return its means, or those of a saved one.

        Raises:
            DisagreementError: If the ranks are not at the same step.
        """
        if self._flight is not None:
            (flight, moments), self._flight = self._flight, None
            step, job, least_step, least_job = moments.result().tolist()
            if (step, job) != (-least_step, -least_job):
                raise DisagreementError(
                    f"the ranks are not at the same step: one is at {step}, another at {-least_step}, in"
                    f" {'the same job' if job == -least_job else 'other jobs'}; make as many steps on all of them, and"
                    " resume all from the same save"
                )
            self._rounds.means = flight.wait()
        return self._rounds.means

    def _end(self, fragment: int, mix: float) -> None:
        """Wait for the means of a fragment, and make a step of the global model."""
        means, self._rounds.means = self._come(), None
        assert means is not None
        finite = all(np.isfinite(self._numpy((mean - mean).sum())) for mean in means)
        if not finite and self._transport.world.rank == 0:
            _LOG.warning(
                "the parameters of a rank are not finite after step %d: all ranks go back to the global model",
                self._rounds.step,
            )
        after = self._rounds.apply(fragment, means if finite else None, self._arrays(), mix)
        self._write(self._rounds.members(fragment), after)

    def finish(self) -> None:
        """Average what is left at the end of training: all ranks then have the global model.

        Call it on all ranks, after the same step.
        """
        flying = self.settings.flies(self._rounds.step)
        if flying is not None:
            self._end(flying, 0.0)
        done = None if self.settings.delay else self.settings.ends(self._rounds.step)
        for fragment in range(self.settings.fragments):
            if fragment != done:
                self._begin(fragment)
                self._end(fragment, 0.0)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the global model in the place of this rank's parameters within the context, as for evaluation.

        It is that of the last exchange, equal on all ranks; nothing is communicated.
        """
        own = deepcopy(list(self._arrays()))
        self._write(range(len(own)), self._rounds.anchors)
        try:
            yield
        finally:
            self._write(range(len(own)), own)

    def stats(self) -> Any:
        """Return bytes and times of this rank so far; an exchange of a fragment counts as a step."""
        return self._compression.stats()

    def _world(self) -> World:
        world: World = self._compression._world()
        return world

    def _saved(self) -> Saved:
        self._come()
        arrays = {name: self._numpy(array) for name, array in self._rounds.named().items()}
        shared = fingerprint({"": arrays}, {"": dict.fromkeys(arrays, Kind())})
        world, steps = self._transport.world, self._rounds.step
        session = SavedSession(
            world.rank, world.size, steps, {"": arrays}, job=self._job, shared=shared, process_set=self._members
        )
        saved: Saved = self._compression._saved()
        return saved._replace(sessions={**saved.sessions, self._session: session})

    def _load(self, saved: list[Saved]) -> None:
        found = [one.sessions[self._session] for one in saved if self._session in one.sessions]
        if not found:
            raise StateError(
                "the loaded state has no global model of these ranks: pass what state_dict() of LocalSteps returned on"
                " them, or saves of LocalSteps.save"
            )
        steps, arrays = found[0].steps, found[0].buckets[""]
        self._rounds.check(steps, arrays)
        if not all(np.isfinite(array).all() for name, array in arrays.items() if not name.startswith("mean")):
            raise StateError("the global model of the loaded state is not finite: load an older one")
        rest = [one._replace(sessions={k: v for k, v in one.sessions.items() if k != self._session}) for one in saved]
        self._compression._load(rest)
        self._come()
        self._job, like = found[0].job, self._rounds.like(steps)
        self._rounds.restore(steps, {name: self._array(array, like[name]) for name, array in arrays.items()})
