"""What a worker is told, and what it reports: one training with one method, one seed and one learning rate."""

from __future__ import annotations

import json
from typing import NamedTuple

from hvd_compress.merging import Merge


class Job(NamedTuple):
    """One training.

    Attributes:
        task: Its name, or ``module:function``.
        spec: Of the method.
        seed: For the weights and the data.
        lr: The learning rate; None for the task's own.
        merge: How gradients are merged.
        epochs: How many; None for the task's own.
        budget: Seconds of training after which it ends.
        data: See `Setting`.
        options: See `Setting`.
        measured: If not 0: train so many steps, only to measure the error of the compressed sums.
        log: The file to which rank 0 adds lines of JSON.
    """

    task: str
    spec: str
    seed: int = 0
    lr: float | None = None
    merge: Merge = 2
    epochs: int | None = None
    budget: float = 600.0
    data: str = ""
    options: dict[str, str] = {}  # noqa: RUF012
    measured: int = 0
    log: str = ""

    def to_json(self) -> str:
        """For the command line of a worker."""
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> Job:
        """In a worker."""
        return cls(**json.loads(text))


class Goal(NamedTuple):
    """What the task says of itself.

    Attributes:
        metric: The name of the metric.
        higher_is_better: Whether more of it is better.
        target: What is good enough, by the task's own judgement; None if it has none.
        steps: How many steps the whole training has.
        parameters: How many numbers the model has that are trained.
    """

    metric: str
    higher_is_better: bool
    target: float | None
    steps: int
    parameters: int


class Point(NamedTuple):
    """The model at one moment.

    Attributes:
        step: Steps so far.
        seconds: Training so far, without evaluations: of rank 0, which waits for the others.
        metric: Of the test data.
    """

    step: int
    seconds: float
    metric: float


class Outcome(NamedTuple):
    """What a training has come to. Times are seconds in each step, bytes are in each step.

    Attributes:
        spec: Of the method.
        seed: Of the weights and the data.
        lr: The learning rate that was asked for.
        goal: What the task says of itself.
        curve: The metric before the first step and at every evaluation.
        steps: How many there were.
        seconds: Of training, without evaluations.
        step_seconds: The mean over the steps of rank 0.
        alone: Computing alone, with all ranks at once and nothing exchanged: the median of the slowest rank.
        encode: In compress; None if unknown. A mean over ranks, as the next two.
        wait: Waiting for the network beyond what computing hides; None if unknown.
        decode: In decompress without waiting; None if unknown.
        gradient_bytes: Of the gradients in full precision.
        payload: Handed to Horovod by the rank with most.
        device: At the network device, the larger of sent and received, of the busiest host; None if unknown.
        memory: The peak of the process with most, in bytes, from the first step on.
        diverged: Whether it was ended because the metric or the loss was not finite any more.
        ranks_equal: Whether all ranks had the same weights at the end, bit for bit.
    """

    spec: str
    seed: int
    lr: float | None
    goal: Goal
    curve: list[Point]
    steps: int
    seconds: float
    step_seconds: float
    alone: float
    encode: float | None
    wait: float | None
    decode: float | None
    gradient_bytes: float
    payload: float
    device: float | None
    memory: int
    diverged: bool
    ranks_equal: bool
