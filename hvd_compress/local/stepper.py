"""The base class of the adapters' `LocalSteps`: exchanges fragments when they are due."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvd_compress.checkpoint.state_dict import SavedSession
from hvd_compress.core.collectives import AllReduce
from hvd_compress.errors import DisagreementError, StateError
from hvd_compress.local.base import Flight, Stepper
from hvd_compress.local.rounds import Rounds
from hvd_compress.local.settings import LocalSettings
from hvd_compress.transport.protocol import Handle, Transport

_LOG = logging.getLogger("hvd_compress")


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
    settings: LocalSettings

    def __init__(
        self, settings: LocalSettings, compression: Any, transport: Transport, label: str, members: Sequence[int] = ()
    ) -> None:
        self._flight: tuple[Flight, Handle] | None = None
        super().__init__(settings, compression, transport, label, members)
        self._rounds = Rounds(settings, self._arrays())

    @abstractmethod
    def _start(self, arrays: Sequence[Any], name: str) -> Flight:
        """Start to average arrays, which are not needed any more."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(step={self._rounds.step}, {self.settings!r})"

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
        finite = self._finite(means)
        if not finite and self._transport.world.rank == 0:
            _LOG.warning(
                "the parameters of a rank are not finite after step %d: all ranks go back to the global model",
                self._rounds.step,
            )
        after = self._rounds.apply(fragment, means if finite else None, self._arrays(), mix)
        self._write(self._rounds.members(fragment), after)

    def finish(self) -> None:
        """Average what is left, so that all ranks have the global model; see `Stepper.finish`."""
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
