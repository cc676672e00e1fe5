"""Schedule of the forward and backward passes of a stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Action = tuple[Literal["forward", "backward"], int]


def one_f_one_b(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    """Yield the schedule 1F1B: after a warm-up, a stage alternates one forward and one backward pass.

    Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, 2019; with a flush after each step,
    as in Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021. A stage keeps the activations of at
    most ``stages - stage`` microbatches.

    Args:
        stage: Index of the stage, from 0.
        stages: Number of stages.
        microbatches: Number of microbatches in a step.

    Yields:
        Pairs of the pass to run and the index of its microbatch.
    """
    ahead = min(stages - stage - 1, microbatches)
    for number in range(ahead):
        yield "forward", number
    for number in range(microbatches - ahead):
        yield "forward", ahead + number
        yield "backward", number
    for number in range(microbatches - ahead, microbatches):
        yield "backward", number
