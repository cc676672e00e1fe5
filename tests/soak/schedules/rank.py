"""One rank of a job with faults, whatever the framework."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from soak.schedules import plants
from soak.schedules.diary import Arr, Diary, End, Loaded, Part, Saved, Saving, State, Stepped, digest
from soak.schedules.schedule import Event, Framework, Segment

from hvd_compress.errors import CompressionError

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.truncate", "os.link", "os.symlink")
"""Names by which Python announces that it changes a folder."""

TYPED = re.compile(rf"ValueError: ({'|'.join(kind.__name__ for kind in CompressionError.__subclasses__())}): (.*)")
"""How TensorFlow quotes an error of this package that came up while a graph ran."""

GRACE = 3.0
"""Seconds that a rank waits for the others before it ends, so that its end is not what ends them."""


class Order(NamedTuple):
    """What a process needs to know.

    Attributes:
        segment: The job.
        rank: Which rank this is.
        folder: For what the ranks write down.
        saves: Where states and weights are saved.
        load: Whether to go on from there.
        environment: Variables to set.
        framework: Of the job.
        plant: Name of a bug to plant; empty for none.
        limit: Seconds until it is a hang.
    """

    segment: Segment
    rank: int
    folder: Path
    saves: Path
    load: bool
    environment: Mapping[str, str]
    framework: Framework
    plant: str
    limit: float


class Incidents(NamedTuple):
    """What happens to this rank in a step.

    Attributes:
        step: The number of the step.
        batch: Whether there is one.
        second: Whether there is a loss for the second optimizer.
        poison: nan or inf for one element of a gradient, or 0; and which element: if the number is odd, of a gradient
            of each optimizer, else of the first.
        thrown: Whether the reduced gradients are thrown away.
        inside: Called in the middle of the backward pass.
    """

    step: int
    batch: bool
    second: bool
    poison: tuple[float, int]
    thrown: bool
    inside: Callable[[], None]


class Trainer(Protocol):
    """Two models with their optimizers, in a framework."""

    compression: Any
    lost: tuple[type[Exception], ...]

    def weights(self) -> list[Arr]:
        """The weights of both models."""

    def put(self, weights: list[Arr]) -> None:
        """Take over weights."""

    def leaves(self) -> dict[str, Arr]:
        """The leaves of the compressor's state, by name."""

    def join(self) -> None:
        """Begin to train the second model."""

    def renew(self) -> None:
        """Make the optimizers anew, with the same compressor."""

    def step(self, incidents: Incidents) -> dict[str, Part]:
        """Make a step; tell what it came to, by optimizer."""

    def close(self) -> None:
        """Take leave of Horovod."""


class Rank:
    """Goes through a segment of a schedule.

    Args:
        order: What to do.
        make: Makes a trainer with a spec and a seed.
    """

    def __init__(self, order: Order, make: Callable[[str, int | str], Trainer]) -> None:
        self.order, self.segment = order, order.segment
        self.diary = Diary(order.folder / f"rank{order.rank}.diary")
        other = self.odd("another spec on one rank", self.segment.before)
        self.trainer = make(other.where if other else self.segment.spec, self.segment.merge)

    def odd(self, kind: str, events: tuple[Event, ...]) -> Event | None:
        """The event of a kind that happens to this rank, if any."""
        return next((e for e in events if e.kind == kind and e.rank in (-1, self.order.rank)), None)

    def run(self) -> End:
        """Go through the segment; tell how it ended."""
        try:
            self.begin()
            for step, events in enumerate(self.segment.steps, start=self.segment.first):
                self.step(step, events)
        except CompressionError as error:
            return End(type(error).__name__, True, False, str(error), traceback.format_exc())
        except Exception as error:
            if found := TYPED.search(str(error)):
                return End(found[1], True, False, found[2], traceback.format_exc())
            lost = isinstance(error, self.trainer.lost)
            return End(type(error).__name__, False, lost, str(error), traceback.format_exc())
        return End()

    def begin(self) -> None:
        """Start from the beginning, or from what was saved."""
        if self.segment.joined:
            self.trainer.join()
        fresh = any(event.kind == "another spec on one rank" and event.number for event in self.segment.before)
        if fresh or not self.order.load:
            return
        with np.load(self.order.saves / "weights.npz") as file:
            self.trainer.put([file[name] for name in file.files])
        alone = any(event.kind == "loaded by one rank" for event in self.segment.before)
        if not alone or self.odd("loaded by one rank", self.segment.before):
            self.load()

    def load(self) -> None:
        self.trainer.compression.load(self.order.saves / "states")
        self.diary.write(Loaded())

    def step(self, number: int, events: tuple[Event, ...]) -> None:
        """Make a step, with all that happens in it."""
        kinds = {event.kind for event in events}
        if self.odd("load by one rank", events):
            self.load()
        if "optimizer anew" in kinds:
            self.trainer.renew()
        joins = [event for event in events if event.kind == "second optimizer"]
        if joins:
            self.trainer.join()
        poison = self.odd("not finite", events)
        self.happen("before", events)
        incidents = Incidents(
            number,
            self.odd("no batch", events) is None,
            not any(event.rank == self.order.rank for event in joins),
            (float(poison.where), poison.number) if poison else (0.0, 0),
            "thrown away" in kinds,
            lambda: self.happen("inside", events),
        )
        parts = self.trainer.step(incidents)
        self.diary.write(Stepped(number, digest(self.trainer.weights()), parts, self.state()))
        self.happen("after", events)
        if "save" in kinds or "kill while saving" in kinds:
            self.save(number, self.odd("kill while saving", events))

    def happen(self, where: str, events: tuple[Event, ...]) -> None:
        """Kill or stall this rank, if that is its turn."""
        stall, kill = self.odd("stall", events), self.odd("kill", events)
        if stall and stall.where == where:
            time.sleep(stall.number / 1000)
        if kill and kill.where == where:
            self.die()

    def die(self) -> None:
        """End this process as a machine that fails."""
        self.sign_off()
        os.kill(os.getpid(), signal.SIGKILL)

    def sign_off(self) -> None:
        """Let the others know that there is no need to wait for this rank."""
        (self.order.folder / f"ended{self.order.rank}").touch()

    def state(self) -> State:
        """The state of the compressor."""
        return State.of(self.trainer.leaves(), self.order.rank)

    def save(self, number: int, killed: Event | None) -> None:
        """Save the weights, by one rank, and the state."""
        if self.order.rank == 0:
            partial = self.order.saves / "weights.part.npz"
            np.savez(partial, *self.trainer.weights())
            partial.replace(self.order.saves / "weights.npz")
        self.diary.write(Saving(number, self.state().kept))
        if killed is not None:
            self.die_in_writing(self.order.saves / "states", killed.number)
        self.trainer.compression.save(self.order.saves / "states")
        if killed is not None:
            self.die()
        self.diary.write(Saved(number))

    def die_in_writing(self, folder: Path, number: int) -> None:
        """Kill this process before its n-th operation that changes files of a folder from now on."""
        left = number

        def hook(name: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            opened = name == "open" and isinstance(arguments[1], str) and bool(set(arguments[1]) & set("wax+"))
            if not (opened or name in CHANGES):
                return
            paths = [os.fsdecode(part) for part in arguments[:2] if isinstance(part, (str, bytes, os.PathLike))]
            if any(str(folder) in path for path in paths):
                left -= 1
                if left < 0:
                    self.die()

        sys.addaudithook(hook)

    def wait_for_others(self, end: End) -> None:
        """Give the others time to end as this one has."""
        self.diary.write(end)
        self.sign_off()
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and len(list(self.order.folder.glob("ended*"))) < self.segment.ranks:
            time.sleep(0.01)


def main(order: Order, make: Callable[[str, int | str], Trainer], init: Callable[[], None]) -> None:
    """Be a rank, in a process of its own, from the beginning to the end."""
    output = os.open(order.folder / f"rank{order.rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(order.limit * 0.8, exit=False)
    signal.alarm(int(order.limit * 1.5))
    os.environ.update(order.environment)
    if order.plant:
        plants.plant(order.plant, order.framework)
    init()
    rank = Rank(order, make)
    end = rank.run()
    rank.wait_for_others(end)
    if not end.error:
        with contextlib.suppress(Exception):
            rank.trainer.close()
    sys.stdout.flush()
    os._exit(0)
