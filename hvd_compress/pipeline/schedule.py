"""In which order a stage goes forward and back through the microbatches of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Action = tuple[Literal["forward", "backward"], int]


def one_f_one_b(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """1F1B: as soon as it can, a stage goes back through one microbatch for each that it goes forward through.

    Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, 2019; with a flush after each step,
    as in Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021. A stage keeps the activations of at
    most ``stages - stage`` microbatches.

    Args:
        stage: Which one, from 0.
        stages: Number of stages.
        microbatches: Number of microbatches in a step.

    Yields:
        What to do, and with which microbatch.
    """
    ahead = min(stages - stage - 1, microbatches)
    for number in range(ahead):
        yield "forward", number
    for number in range(microbatches - ahead):
        yield "forward", ahead + number
        yield "backward", number
    for number in range(microbatches - ahead, microbatches):
        yield "backward", number
