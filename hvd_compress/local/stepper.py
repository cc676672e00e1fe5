"""The base class of the adapters' `LocalSteps`: exchanges fragments when they are due."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hvd_compress.checkpoint.state_dict import SavedSession
from hvd_compress.core.collectives import AllReduce, Broadcast
from hvd_compress.errors import DisagreementError, StateError, UnsupportedError
from hvd_compress.local.base import Flight, Stepper
from hvd_compress.local.rounds import Rounds
from hvd_compress.local.settings import LocalSettings
from hvd_compress.transport.protocol import Handle, Transport

_LOG = logging.getLogger("hvd_compress")


class Stage(IntEnum):
    """Where a rank is in its training when it meets the others."""

    LATE = 0
    """It has missed a meeting."""
    STEP = 1
    """In a step."""
    END = 2
    """After its last step: what is left is averaged, without newcomers."""
    CLOSE = 3
    """After that: all ranks are waited for, and get the global model."""


class Meeting(NamedTuple):
    """The ranks of an exchange.

    Attributes:
        members: Those that average.
        newcomers: Those that have missed an exchange, and go on from the global model of this one.
    """

    members: Sequence[int]
    newcomers: Sequence[int] = ()

    @property
    def everyone(self) -> list[int]:
        """All of them, ascending."""
        return sorted([*self.members, *self.newcomers])


class LocalStepper(Stepper):
    """Averages the models of all ranks every few steps.

    Args:
        settings: The settings.
        compression: Compresses the differences.
        transport: Transport of the ranks.
        label: See `Stepper`.
        members: See `Stepper`.
    """

    _kind = "local_steps"
    _before = False
    _supports_quorum: ClassVar[bool] = False
    settings: LocalSettings

    def __init__(
        self, settings: LocalSettings, compression: Any, transport: Transport, label: str, members: Sequence[int] = ()
    ) -> None:
        if settings.quorum is not None and not self._supports_quorum:
            raise UnsupportedError("quorum= is supported by hvd_compress.distributed.LocalSteps only: leave it out")
        self._flight: tuple[Flight, Handle] | None = None
        self._ended = False
        super().__init__(settings, compression, transport, label, members)
        self._rounds = Rounds(settings, self._arrays())
        self._meeting = Meeting(range(self._transport.world.size))

    @property
    def steps(self) -> int:
        """Number of steps so far, with those of the others that this rank has missed."""
        return self._rounds.step

    def _meet(self, stage: Stage) -> Meeting:
        """Return the ranks of the next exchange."""
        return self._meeting

    def _among(self, ranks: Sequence[int]) -> Transport:
        """Return a transport of some ranks, of which this is one."""
        return self._transport

    @abstractmethod
    def _start(self, arrays: Sequence[Any], name: str) -> Flight:
        """Start to average arrays, which are not needed any more."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(step={self._rounds.step}, {self.settings!r})"

    def _step(self) -> None:
        """Do what is due after a step."""
        if self._ended:
            return
        rounds = self._rounds
        rounds.step += 1
        begins, ends = self.settings.begins(rounds.step), self.settings.ends(rounds.step)
        if begins is not None:
            if not self._begin(begins):
                return
        elif self._flight is not None:
            self._flight[0].advance()
        if ends is not None and self._flies():
            self._end(ends, self.settings.mix)

    def _flies(self) -> bool:
        """Return whether an exchange is on its way, or its means have come; `finish` ends it before its time."""
        return self._flight is not None or self._rounds.means is not None

    def _takes_part(self, stage: Stage) -> bool:
        """Meet the others; return whether this rank averages with them, or else has their global model now."""
        missing = self._missing()
        self._meeting = self._meet(stage)
        if self._is_new():
            self._share()
            return False
        if self._leads() and self._missing() not in ([], missing):
            _LOG.warning("the ranks %s are late: the others average without them", self._missing())
        return True

    def _begin(self, fragment: int, stage: Stage = Stage.STEP) -> bool:
        """Start to average a fragment; see `_takes_part`."""
        if not self._takes_part(stage):
            return False
        among = self._among(self._meeting.members)
        moment = self._rounds.step, self._job
        told = AllReduce(self._array(np.array([*moment, *(-one for one in moment)])), "max")
        self._compression._meter.count(told)
        moments = among.start(told, f"hvd_compress.{self._label}.moment")
        differences = self._rounds.differences(fragment, self._arrays())
        self._flight = self._start(differences, f"{self._label}.{fragment}"), moments
        return True

    def _rank(self) -> int:
        return self._transport.world.rank

    def _is_new(self) -> bool:
        return self._rank() in self._meeting.newcomers

    def _leads(self) -> bool:
        """Return whether this is the first rank of those that average."""
        return self._rank() == self._meeting.members[0]

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._transport.world.size) if rank not in self._meeting.everyone]

    def _share(self, ended: bool = False) -> None:
        """Give the newcomers, if there are any, the global model, and tell them whether the training has ended."""
        if not self._meeting.newcomers:
            return
        among, root = self._among(self._meeting.everyone), self._meeting.everyone.index(self._meeting.members[0])
        named = self._rounds.named()
        told = []
        for name, array in {"": self._array(np.array([self.steps, ended])), **named}.items():
            message = Broadcast(array, root)
            self._compression._meter.count(message)
            told.append(among.start(message, f"hvd_compress.{self._label}.model.{name}").result())
        if self._is_new():
            step, ended = told[0].tolist()
            _LOG.warning(
                "rank %d was late at step %d: it goes on from the global model of step %d",
                self._rank(),
                self.steps,
                step,
            )
            self._ended = bool(ended)
            self._rounds.restore(step, dict(zip(named, told[1:], strict=True)))
            self._write(range(len(self._rounds.anchors)), self._rounds.anchors)

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
        finite = self._finite(means)
        if not finite and self._leads():
            _LOG.warning(
                "the parameters of a rank are not finite after step %d: all ranks go back to the global model",
                self._rounds.step,
            )
        after = self._rounds.apply(fragment, means if finite else None, self._arrays(), mix)
        self._write(self._rounds.members(fragment), after)
        self._share()

    def finish(self) -> None:
        """Average what is left, so that all ranks have the global model; see `Stepper.finish`.

        With ``quorum``, all ranks are waited for up to the time limit of their process group.
        """
        while not self._ended:
            self._average_rest()
        self._ended = False
        self._write(range(len(self._rounds.anchors)), self._rounds.anchors)

    def _average_rest(self) -> None:
        """Average what is left, unless the others turn out to have done more steps without this rank."""
        flying = self.settings.flies(self.steps)
        if flying is not None and self._flies():
            self._end(flying, 0.0)
        done = None if self.settings.delay else self.settings.ends(self._rounds.step)
        for fragment in range(self.settings.fragments):
            if fragment != done:
                if not self._begin(fragment, Stage.END):
                    return
                self._end(fragment, 0.0)
        if self.settings.quorum is not None:
            if not self._takes_part(Stage.CLOSE):
                return
            self._share(ended=True)
        self._ended = True

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the global model in the place of this rank's parameters within the context, as for evaluation.

        It is that of the last exchange, equal on all ranks; nothing is communicated.
        """
        with self._in_place(self._rounds.anchors):
            yield

    def _settle(self) -> None:
        self._come()

    def _kept(self) -> tuple[int, dict[str, Any]]:
        return self._rounds.step, self._rounds.named()

    def _check(self, saved: SavedSession) -> None:
        arrays = saved.buckets[""]
        self._rounds.check(saved.steps, arrays)
        if not all(np.isfinite(array).all() for name, array in arrays.items() if not name.startswith("mean")):
            raise StateError("the global model of the loaded state is not finite: load an older one")

    def _restore(self, saved: SavedSession) -> None:
        like = self._rounds.like(saved.steps)
        arrays = {name: self._array(array, like[name]) for name, array in saved.buckets[""].items()}
        self._rounds.restore(saved.steps, arrays)
