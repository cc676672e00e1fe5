"""The loop of a worker: entries take turns, so that noise of the machine affects all equally."""

from __future__ import annotations

import cProfile
import json
import pstats
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hvd_compress.engine.stats import Stats
from hvd_compress.tools.bench.distributed.task import ALONE, TURN, Entry, Part, Task
from hvd_compress.tools.ranks.process import Device, device_bytes, forget_peak, peak, refusals

_ROWS = 15
"""Rows of a profile."""


class Subject(Protocol):
    """An entry, ready to make steps."""

    @property
    def called(self) -> float | None:
        """Seconds in compress and decompress so far, without waiting; None if unknown."""

    def step(self) -> float:
        """Make a step, and return the seconds of it that count."""

    def release(self) -> None:
        """Free the gradients."""

    def stats(self) -> Stats | None:
        """Return the compression's; None for Horovod's own."""


class Bench(Protocol):
    """A framework.

    Attributes:
        rank: Rank of this process.
        device: Device of this process, such as ``"cuda:0"``.
        reads_device: Whether this rank reads the counters of the network device, for all ranks of its host.
    """

    rank: int
    device: str
    reads_device: bool

    def make(self, entry: Entry, what: str, model: str) -> Subject:
        """Return an entry, ready to make steps."""

    def gather(self, values: list[float]) -> list[list[float]]:
        """Return the values of all ranks; all wait for the last."""

    def gather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks."""


class Now(NamedTuple):
    sent: int | None
    received: int | None
    stats: Stats | None
    called: float | None


def measure(task: Task, start: Callable[[Sequence[str], Device], Bench]) -> None:
    """Measure all that is wanted. Rank 0 writes it down: its own part as it comes, that of the others at the end.

    Args:
        task: The task of the job.
        start: Starts the ranks for these methods, on a device.
    """
    with refusals():
        _measure(task, start(task.specs, task.device))


def _measure(task: Task, bench: Bench) -> None:
    lines = []
    for part in _parts(task, bench):
        lines.append(json.dumps(part._asdict()) + "\n")
        if bench.rank == 0:
            with task.report(0).open("a") as file:
                file.write(lines[-1])
    for rank, text in enumerate(bench.gather_text("".join(lines))):
        if bench.rank == 0 < rank:
            task.report(rank).write_text(text)


def _parts(task: Task, bench: Bench) -> Iterator[Part]:
    if task.what == "memory":
        yield from (_memory(task, bench, index) for index in range(1, len(task.entries)))
        return
    subjects = []
    for index, entry in enumerate(task.entries):
        subject = _warm(task, bench, entry)
        subject.release()
        subjects.append(subject)
        yield Part(index)
    for turn in range(task.turns):
        for index, subject in enumerate(subjects):
            yield _turn(bench, index, subject, min(TURN, task.steps - turn * TURN))
    for index, subject in enumerate(subjects if task.profiled else ()):
        yield Part(index, profile=_profile(subject, task.profiled))


def _warm(task: Task, bench: Bench, entry: Entry) -> Subject:
    """Make the subject of an entry and run its warm-up steps."""
    subject = bench.make(entry, task.what, task.model)
    _steps(subject, max(task.warmup, entry.warmup))
    return subject


def _steps(subject: Subject, steps: int) -> list[float]:
    return [subject.step() for _ in range(steps)]


def _turn(bench: Bench, index: int, subject: Subject, steps: int) -> Part:
    """Make some steps; one goes before, as caches still hold what the entry before has left there."""
    bench.gather([0.0])
    subject.step()
    bench.gather([0.0])
    before = _now(bench, subject)
    seconds = _steps(subject, steps)
    bench.gather([0.0])
    after = _now(bench, subject)
    subject.release()
    own = _between(before.stats, after.stats) if before.stats and after.stats else {}
    return Part(
        index,
        seconds,
        sent=_less(after.sent, before.sent),
        received=_less(after.received, before.received),
        called=_less(after.called, before.called),
        **own,
    )


def _now(bench: Bench, subject: Subject) -> Now:
    return Now(
        device_bytes("tx_bytes") if bench.reads_device else None,
        device_bytes("rx_bytes") if bench.reads_device else None,
        subject.stats(),
        subject.called,
    )


def _less(after: Any, before: Any) -> Any:
    return None if after is None or before is None else after - before


def _between(before: Stats, after: Stats) -> dict[str, Any]:
    return {
        "payload": after.bytes_sent - before.bytes_sent,
        "encode": _less(after.encode_seconds, before.encode_seconds),
        "wait": _less(after.wait_seconds, before.wait_seconds),
        "decode": _less(after.decode_seconds, before.decode_seconds),
    }


def _memory(task: Task, bench: Bench, index: int) -> Part:
    """Return the peak of an entry's steps beyond that of steps in which nothing is reduced.

    First come some steps of small gradients, so that code and what it loads do not count.
    """
    entry = task.entries[index]
    _steps(bench.make(entry, task.what, "small"), 3)
    alone = bench.make(Entry(ALONE), task.what, task.model)
    _steps(alone, task.warmup)
    base = _peak(bench.device, lambda: _steps(alone, 2))
    alone.release()
    subject = _warm(task, bench, entry)
    return Part(index, memory=_peak(bench.device, lambda: _steps(subject, task.steps)) - base)


def _peak(device: str, work: Callable[[], Any]) -> int:
    forget_peak(device)
    work()
    return peak(device)


def _profile(subject: Subject, steps: int) -> list[dict[str, Any]]:
    """Return functions and their seconds in each step: those that take most, and the two that Horovod calls."""
    _steps(subject, 1)
    profiler = cProfile.Profile()
    begin = time.perf_counter()
    profiler.enable()
    _steps(subject, steps)
    profiler.disable()
    total = time.perf_counter() - begin
    found = vars(pstats.Stats(profiler))["stats"]
    rows = [_row("all", 1, total, total, steps)]
    for number, (key, line) in enumerate(sorted(found.items(), key=lambda item: -item[1][2])):
        (file, place, name), (_, calls, own, with_callees, _) = key, line
        if number < _ROWS or (name in ("compress", "decompress") and "hvd_compress" in file):
            where = f"{Path(file).name}:{place} " if place else ""
            rows.append(_row(f"{where}{name}", calls, own, with_callees, steps))
    return rows


def _row(function: str, calls: int, own: float, with_callees: float, steps: int) -> dict[str, Any]:
    own, with_callees = own / steps, with_callees / steps
    return {"function": function, "calls": calls / steps, "own": own, "with_callees": with_callees}
