"""The job of a worker, and its result: one training with one method, one seed and one learning rate."""

from __future__ import annotations

import json
from typing import NamedTuple

from hvd_compress.core.bucketing import Merge
from hvd_compress.tools.ranks.process import Device


class Job(NamedTuple):
    """One training."""

    task: str  # A name, or ``file.py:function``
    spec: str
    seed: int = 0  # The seed of the weights and the data
    lr: float | None = None  # The learning rate; None for the task's own
    merge: Merge = 2  # The merge policy
    epochs: int | None = None  # None for the task's own
    budget: float = 600.0  # Seconds of training after which it ends
    data: str = ""  # See `Setting`
    # See `Setting`
    options: dict[str, str] = {}  # noqa: RUF012
    device: Device = "cpu"
    measured: int = 0  # If not 0: train so many steps, only to measure the error of the compressed sums
    log: str = ""  # The file to which rank 0 adds lines of JSON

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> Job:
        return cls(**json.loads(text))


class Goal(NamedTuple):
    """The task's metric and target, and the size of the training."""

    metric: str
    higher_is_better: bool  # Whether a higher metric is better
    target: float | None  # The task's own target; None if it has none
    steps: int  # Steps of the whole training
    parameters: int  # The count of trained parameters
    epochs: int | None = None  # Epochs of the whole training
    lr: float | None = None  # The learning rate at the start


class Point(NamedTuple):
    """The model at one evaluation."""

    step: int  # Steps so far
    seconds: float  # Training so far, without evaluations: of rank 0, which waits for the others
    metric: float  # The metric on the test data


class Outcome(NamedTuple):
    """The result of a training. Times are in seconds per step, bytes per step."""

    spec: str
    seed: int
    lr: float | None  # The learning rate that was asked for
    goal: Goal  # The goal of the task
    curve: list[Point]  # The metric before the first step and at every evaluation
    steps: int  # Steps made
    seconds: float  # Training time, without evaluations
    step_seconds: float  # The mean over the steps of rank 0
    alone: float  # Computing alone, with all ranks at once and nothing exchanged: the median of the slowest rank
    encode: float | None  # In compress; None if unknown. A mean over ranks, as the next two
    wait: float | None  # Waiting for the network beyond what computing hides; None if unknown
    decode: float | None  # In decompress without waiting; None if unknown
    gradient_bytes: float  # The gradients in full precision
    payload: float  # The payload of the rank with most
    device: float | None  # At the network device, the larger of sent and received, of the busiest host; None if unknown
    memory: int  # The peak of the process with most, in bytes, from the first step on
    diverged: bool  # Whether it ended because the metric or the loss was not finite
    ranks_equal: bool  # Whether all ranks had the same weights at the end, bit for bit
