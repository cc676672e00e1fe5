"""Trainings and comparisons as small as can be computed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compare.examples import MACHINE

from hvd_compress.tools.compare.job import Goal, Outcome, Point
from hvd_compress.tools.compare.results import Comparison

ACCURACY, PERPLEXITY = Goal("accuracy", True, 0.9, 40, 1000), Goal("perplexity", False, 100.0, 40, 1000)


def made(curve: Sequence[tuple[int, float, float]], **changes: Any) -> Outcome:
    """A training with this curve."""
    points = [Point(*point) for point in curve]
    steps, seconds = (points[-1].step, points[-1].seconds) if points else (0, 0.0)
    found = Outcome(
        "topk", 0, None, ACCURACY, points, steps, seconds, 0.1, 0.04, None, None, None, 4000, 400, None, 1, False, True
    )
    return found._replace(**changes)


def timed(seconds: float | None, end: float = 0.95, **changes: Any) -> Outcome:
    """One that is at 0.9 after so many seconds, at its 20th step of 40, or never."""
    if seconds is None:
        return made([(0, 0.0, 0.1), (40, 50.0, min(end, 0.8))], **changes)
    return made([(0, 0.0, 0.1), (20, seconds, 0.9), (40, 2 * seconds, end)], **changes)


def compared(trainings: Mapping[str, Sequence[Outcome | None]], **changes: Any) -> Comparison:
    """Of each method, a training for each seed; None for one that failed."""
    seeds = max(map(len, trainings.values()))
    outcomes = [
        one._replace(spec=spec, seed=seed)
        for spec, ones in trainings.items()
        for seed, one in enumerate(ones)
        if one is not None
    ]
    found = Comparison(
        "task", "torch", "here", 2, "command", MACHINE, "2025", {}, list(trainings), seeds, 0.9, outcomes, [], {}, []
    )
    return found._replace(**changes)
