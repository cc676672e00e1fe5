"""A rank of a training: the loop, whatever the framework; the clock stands still while the model is evaluated."""

from __future__ import annotations

import json
import math
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy.typing as npt

from hvd_compress.engine.spec import parse
from hvd_compress.lab import Setting, Training
from hvd_compress.local.settings import method_of
from hvd_compress.tools.compare.job import Goal, Job, Outcome, Point
from hvd_compress.tools.compare.results import outcome_facts
from hvd_compress.tools.compare.tasks import find
from hvd_compress.tools.ranks.process import Device, device_bytes, forget_peak, peak, refusals

WARM, ALONE = 3, 9
"""Steps of computing alone that do not count, and that do."""


class Trainer(Protocol):
    """A framework.

    Attributes:
        rank: Rank of this process.
        size: How many ranks there are.
        device: Device of this process, such as ``"cuda:0"``.
        reads_device: Whether this rank reads the counters of the network device, for all ranks of its host.
        compression: That of `distribute`.
    """

    rank: int
    size: int
    device: str
    reads_device: bool
    compression: Any

    def build(self, make: Callable[[Setting], Training], setting: Setting) -> Training:
        """Make the model from the same seed on all ranks; later random numbers, as of dropout, differ between them."""

    def step_alone(self, batch: Any) -> None:
        """Make a step in which nothing is exchanged."""

    def distribute(self, spec: str, job: Job) -> None:
        """Undo the steps made alone, give all ranks the same weights, and compress gradients from now on."""

    def step(self, batch: Any) -> float:
        """Make a step, and return the loss of this rank."""

    def evaluate(self) -> float:
        """Return what ``Training.evaluate`` says on this rank."""

    def finish(self) -> None:
        """Give all ranks the same weights at the end, if they have others."""

    def gather(self, values: list[float]) -> list[list[float]]:
        """Return the values of all ranks; all wait for the last."""

    def learning_rate(self) -> float:
        """Return the learning rate of the optimizer's first parameters."""

    def scale_rate(self, factor: float) -> None:
        """Set the learning rate to this multiple of that at the start."""

    def weights(self) -> Iterator[npt.NDArray[Any]]:
        """Return the parameters that are trained."""


class Clock:
    """The time and traffic of training alone."""

    def __init__(self, reads_device: bool) -> None:
        self._reads_device = reads_device
        self.seconds = 0.0
        self.sent = self.received = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        sent, received, begin = *self._bytes(), time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begin
        now = self._bytes()
        self.sent += now[0] - sent
        self.received += now[1] - received

    def _bytes(self) -> tuple[int, int]:
        return (device_bytes("tx_bytes"), device_bytes("rx_bytes")) if self._reads_device else (0, 0)


class Log:
    """The file of rank 0; other ranks write nothing."""

    def __init__(self, job: Job, trainer: Trainer) -> None:
        self._path = Path(job.log) if trainer.rank == 0 else None

    def add(self, kind: str, facts: Any) -> None:
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps({kind: facts}) + "\n")


class Run:
    """One training on one rank."""

    def __init__(self, job: Job, make: Callable[[Setting], Training], trainer: Trainer) -> None:
        method = parse(method_of(job.spec))
        place = trainer.rank, trainer.size
        plain, updates = method.needs_plain_sgd, method.preconditioned
        setting = Setting(job.seed, *place, job.lr, not plain, job.data, job.options, updates, trainer.device)
        self._job, self._trainer, self._method = job, trainer, method
        self._training = trainer.build(make, setting)
        self._log = Log(job, trainer)
        self._clock = Clock(trainer.reads_device)
        self._curve: list[Point] = []
        self._loss = 0.0
        self._step = 0

    def begin(self) -> None:
        """Measure computing alone; from then on gradients are exchanged."""
        alone = self._alone()
        self._goal = self._find_goal()
        self._log.add("goal", self._goal._asdict())
        spec = measuring(self._job.spec) if self._job.measured else self._job.spec
        self._trainer.distribute(spec, self._job)
        self._seconds_alone = max(found for (found,) in self._trainer.gather([alone]))
        forget_peak(self._trainer.device)

    def _alone(self) -> float:
        """Return the median of steps in which all ranks compute and nobody communicates."""
        laps = []
        for batch in islice(self._batches(), WARM + ALONE):
            self._trainer.gather([0.0])  # so that the others compute at the same time
            begin = time.perf_counter()
            self._trainer.step_alone(batch)
            laps.append(time.perf_counter() - begin)
        return median(laps[WARM:] or laps)

    def _find_goal(self) -> Goal:
        training, epochs = self._training, self._epochs
        trained = sum(one.size for one in self._trainer.weights())
        steps = sum(1 for _ in training.batches(0)) * epochs
        return Goal(
            training.metric,
            training.higher_is_better,
            training.target,
            steps,
            trained,
            epochs,
            self._trainer.learning_rate(),
        )

    @property
    def _epochs(self) -> int:
        return self._training.epochs if self._job.epochs is None else self._job.epochs

    def _batches(self) -> Iterator[Any]:
        for epoch in range(self._epochs):
            yield from self._training.batches(epoch)

    def measure(self) -> None:
        """Make some steps to measure the error of the compressed sums."""
        for batch in islice(self._batches(), self._job.measured):
            self._make_step(batch)
        self._log.add("vnmse", self._trainer.compression.stats().vnmse)

    def train(self) -> None:
        """Train until it is done, out of budget or diverged."""
        going = self._look(0)
        batches = self._batches()
        step = 0
        while going and (made := self._some_steps(batches)):
            step += made
            going = self._look(step)
        self._trainer.finish()
        self._log.add("outcome", outcome_facts(self._outcome(step, diverged=self._diverged())))

    def _some_steps(self, batches: Iterator[Any]) -> int:
        """Make the steps until the next evaluation, and return how many there were."""
        made = 0
        with self._clock.running():
            while made < self._training.every and (batch := next(batches, None)) is not None:
                self._make_step(batch)
                made += 1
            self._trainer.gather([0.0])  # the others' steps are part of the time
        return made

    def _make_step(self, batch: Any) -> None:
        if self._training.schedule is not None:
            self._trainer.scale_rate(self._training.schedule(self._step / self._goal.steps))
        self._loss = self._trainer.step(batch)
        self._step += 1

    def _look(self, step: int) -> bool:
        """Evaluate; return whether to go on, on which all ranks agree."""
        found = self._trainer.gather([self._trainer.evaluate(), self._clock.seconds, self._loss])
        mean = sum(metric for metric, _, _ in found) / len(found)
        seconds, finite = found[0][1], all(math.isfinite(value) for rank in found for value in rank)
        metric = _finished(self._training, mean) if finite else math.nan
        self._curve.append(Point(step, seconds, metric))
        self._log.add("point", [step, seconds, metric if math.isfinite(metric) else None])
        return math.isfinite(metric) and seconds < self._job.budget

    def _diverged(self) -> bool:
        return not math.isfinite(self._curve[-1].metric)

    def _outcome(self, steps: int, *, diverged: bool) -> Outcome:
        stats, clock, made = self._trainer.compression.stats(), self._clock, max(steps, 1)
        times = [stats.encode_seconds, stats.wait_seconds, stats.decode_seconds]
        numbers = [math.nan if value is None else value / made for value in times]
        sizes = [stats.bytes_sent / made, max(clock.sent, clock.received) / made, float(peak(self._trainer.device))]
        found = self._trainer.gather([*numbers, *sizes, _fingerprint(self._trainer.weights())])
        columns = list(zip(*found, strict=True))
        encode, wait, decode = (_known(sum(column) / len(column)) for column in columns[:3])
        return Outcome(
            self._job.spec,
            self._job.seed,
            self._job.lr,
            self._goal,
            self._curve,
            steps,
            self._curve[-1].seconds,
            self._curve[-1].seconds / made,
            self._seconds_alone,
            encode,
            wait,
            decode,
            stats.gradient_bytes / made,
            max(columns[3]),
            max(columns[4]) if self._trainer.reads_device else None,
            round(max(columns[5])),
            diverged,
            len(set(columns[6])) == 1,
        )


def _fingerprint(weights: Iterator[npt.NDArray[Any]]) -> float:
    """Return a checksum, which a float64 holds exactly."""
    total = 0
    for one in weights:
        total = zlib.crc32(one.tobytes(), total)
    return float(total)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _finished(training: Training, mean: float) -> float:
    try:
        return training.finish(mean)
    except OverflowError:  # a perplexity beyond all numbers
        return math.nan


def measuring(spec: str) -> str:
    """Return the same method with ``measure=on``."""
    return f"{spec}{',' if ':' in spec else ':'}measure=on"


def main(framework: str, trainer: Callable[[Sequence[str], Device], Trainer]) -> None:
    """Do the job that the command line tells, on this rank."""
    job = Job.from_json(sys.argv[1])
    with refusals():
        one = Run(job, find(job.task, framework), trainer([method_of(job.spec)], job.device))
        one.begin()
        if job.measured:
            one.measure()
        else:
            one.train()


def merged(spec: str, job: Job) -> dict[str, Any]:
    """Return how to merge, for ``Compression.parse``: methods that travel as Horovod's own allreduce are not merged."""
    return {} if parse(method_of(spec)).linear else {"merge": job.merge}
