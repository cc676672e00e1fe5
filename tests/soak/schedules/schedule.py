"""Schedules of faults: what happens at which step of a job and its restarts, drawn from a seed."""

from __future__ import annotations

from random import Random
from typing import Literal, NamedTuple

Framework = Literal["torch", "keras"]

KEEPS = {
    "topk:ratio=0.1,min_size=0": True,
    "topk:ratio=0.1,min_size=100,start=3": True,
    "randomk:ratio=0.1,min_size=0": True,
    "qsgd:min_size=0": False,
    "qsgd:min_size=0,feedback=on": True,
    "powersgd:rank=2,min_size=0,min_gain=0": True,
    "efsignsgd:twoway=on,min_size=0": True,
    "dgc:ratio=0.1,min_size=0": False,
    "topk:ratio=0.1,min_size=0,feedback=ef21": False,
    "fp16": False,
}
"""Specs, and whether what is sent and what is kept add up to the gradients.

They keep a residual, a shared factor, a server's part, a velocity, a counter or nothing.
"""

SPECS = tuple(KEEPS)

STATELESS = ("fp16",)
"""Those that keep nothing: it does not matter who loads that."""

MERGES: tuple[int | str, ...] = (1, 2, "layer")


class Event(NamedTuple):
    """Something that happens to a job.

    Attributes:
        kind: One of `DAMAGE`, `STARTS` or `INCIDENTS`.
        rank: To which rank; -1 for all of them.
        where: A finer place, which depends on the kind.
        number: A finer choice, which depends on the kind.
    """

    kind: str
    rank: int = -1
    where: str = ""
    number: int = 0

    def __str__(self) -> str:
        rank = "" if self.rank < 0 else f" on rank {self.rank}"
        return f"{self.kind}{f' {self.where}' if self.where else ''}{rank}{f' ({self.number})' if self.number else ''}"


DAMAGE = ("stale file", "missing file", "partial file")
"""Done to the saved files between two jobs."""

STARTS = ("another spec", "another spec on one rank", "loaded by one rank")
"""Odd ways to begin a job. Of the second, ``where`` is the spec, and with the number 1 nobody loads."""

INCIDENTS = (
    "kill",
    "kill while saving",
    "stall",
    "not finite",
    "no batch",
    "optimizer anew",
    "thrown away",
    "second optimizer",
    "load by one rank",
    "save",
)
"""What happens in a step. A step saves at its end."""


class Segment(NamedTuple):
    """One job: a start of all ranks, and the steps until they end.

    Attributes:
        ranks: How many.
        spec: Of the compression, on all ranks but those of a ``another spec on one rank``.
        merge: How gradients are put into buckets.
        first: Number of the first step.
        joined: Whether the second optimizer is there from the beginning.
        before: What is damaged before it starts, and how it starts.
        steps: What happens in each step.
    """

    ranks: int
    spec: str
    merge: int | str
    first: int
    joined: bool
    before: tuple[Event, ...]
    steps: tuple[tuple[Event, ...], ...]

    def events(self) -> list[Event]:
        """All of them, in their order."""
        return [*self.before, *(event for step in self.steps for event in step)]

    def has(self, *kinds: str) -> bool:
        """Whether there is an event of one of some kinds."""
        return any(event.kind in kinds for event in self.events())

    @property
    def may_be_refused(self) -> bool:
        """Whether ranks may end with a typed error."""
        return self.has(*DAMAGE, *STARTS, "load by one rank")

    @property
    def refuses_alone(self) -> int | None:
        """A rank that alone knows, when it loads, that the state is not of its method; its end tells the others."""
        return next((e.rank for e in self.before if e.kind == "another spec on one rank" and not e.number), None)

    @property
    def must_be_refused(self) -> bool:
        """Whether nothing but a typed error is right: ranks that are set up differently on purpose."""
        loads = self.spec not in STATELESS and self.has("loaded by one rank", "load by one rank")
        return loads or self.has("another spec on one rank")


class Schedule(NamedTuple):
    """Jobs that follow each other, each from what the one before has saved.

    Attributes:
        framework: ``"torch"`` or ``"keras"``.
        seed: From which it was drawn.
        segments: The jobs.
    """

    framework: Framework
    seed: int
    segments: tuple[Segment, ...]

    def __str__(self) -> str:
        lines = [f"{self.framework} seed {self.seed}"]
        for number, segment in enumerate(self.segments):
            setup = f"{segment.spec}, merge={segment.merge}{', second optimizer' if segment.joined else ''}"
            lines.append(f"  job {number}: {segment.ranks} ranks, {setup}")
            lines += [f"    before: {event}" for event in segment.before]
            for step, events in enumerate(segment.steps, start=segment.first):
                lines += [f"    step {step}: {event}" for event in events]
        return "\n".join(lines)


class _Drawing:
    """Draws a schedule: what is left to draw from, and what has happened so far."""

    def __init__(self, framework: Framework, seed: int) -> None:
        self.random = Random(f"{framework} {seed}")
        self.framework = framework
        self.spec = self.random.choice(SPECS)
        self.merge = self.random.choice(MERGES)
        self.ranks = self.random.choice((2, 2, 3))
        self.joined = self.random.random() < 0.15
        self.joins_late = not self.joined and self.random.random() < 0.3
        self.saves = 0
        self.step = 0

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def one(self, ranks: int) -> int:
        return self.random.randrange(ranks)

    def start(self) -> tuple[int, str, list[Event]]:
        """Number of ranks, spec and events of the next job's start."""
        draw, spec = self.random, self.spec
        before: list[Event] = []
        if self.saves and self.chance(0.35):
            self.ranks = 5 - self.ranks
        kind = draw.choices([*DAMAGE, *STARTS, ""], [2, 1, 1, 1, 1, 1, 4] if self.saves else [0, 0, 0, 0, 1, 0, 12])[0]
        other = draw.choice([other for other in SPECS if other != spec])
        if kind in DAMAGE:
            before.append(Event(kind, number=draw.randrange(1, 1000)))
        elif kind == "another spec":
            before, spec = [Event(kind)], other
        elif kind == "another spec on one rank":
            before.append(Event(kind, self.one(self.ranks), other, draw.randrange(2)))
        elif kind:
            before.append(Event(kind, self.one(self.ranks)))
        return self.ranks, spec, before

    def incidents(self, ranks: int) -> list[Event]:
        """What happens in a step, besides saving and what ends the job."""
        draw = self.random
        events: list[Event] = []
        kinds = ["stall", "not finite", "no batch", "optimizer anew", "thrown away", ""]
        kind = draw.choices(kinds, [1, 2, 1.5, 1, 1 if self.framework == "torch" else 0, 5])[0]
        if kind == "stall":
            where = draw.choice(("before", "inside", "after"))
            events.append(Event(kind, self.one(ranks), where, draw.randrange(50, 400)))
        elif kind == "not finite":
            events.append(Event(kind, self.one(ranks), draw.choice(("nan", "inf")), draw.randrange(1, 1000)))
        elif kind == "no batch":
            events.append(Event(kind, self.one(ranks)))
        elif kind:
            events.append(Event(kind))
        if self.joins_late and not self.joined and self.chance(0.3):
            events.append(Event("second optimizer", self.one(ranks) if self.chance(0.6) else -1))
            self.joined = True
        return events

    def segment(self, last: bool) -> Segment:
        """The next job."""
        draw, first, joined = self.random, self.step, self.joined
        ranks, spec, before = self.start()
        refused = any(event.kind in STARTS for event in before)
        count = 2 if refused else draw.randrange(3, 6)
        steps = []
        for number in range(count):
            events = [] if refused else self.incidents(ranks)
            if not refused and (self.chance(0.4) or (number == 0 and not self.saves and not last)):
                events.append(Event("save"))
            steps.append(events)
        if not refused:
            if not last:
                self.end(steps, ranks)
            self.saves += sum(event.kind == "save" for events in steps for event in events)
            self.step += count
        return Segment(ranks, spec, self.merge, first, joined, tuple(before), tuple(map(tuple, steps)))

    def end(self, steps: list[list[Event]], ranks: int) -> None:
        """Draw what ends a job early, if anything; a step without it must follow, in which others notice."""
        draw = self.random
        kind = draw.choices(["kill", "kill while saving", "load by one rank", ""], [3, 3, 2, 3])[0]
        if not kind or (kind == "load by one rank" and not self.saves):
            return
        steps[-2:] = [[event for event in events if event.kind != "save"] for events in steps[-2:]]
        if kind == "kill":
            steps[-2].append(Event(kind, self.one(ranks), draw.choice(("before", "inside", "after"))))
        elif kind == "kill while saving":
            steps[-2].append(Event(kind, self.one(ranks), number=draw.randrange(0, 6)))
        else:
            steps[-3] = []  # a step that counts, so that what is saved is not what this rank has anyway
            steps[-2].append(Event(kind, self.one(ranks)))


def draw(framework: Framework, seed: int) -> Schedule:
    """Draw the schedule of a seed: always the same."""
    drawing = _Drawing(framework, seed)
    count = drawing.random.choices((1, 2, 3), (3, 4, 4))[0]
    return Schedule(framework, seed, tuple(drawing.segment(number == count - 1) for number in range(count)))
