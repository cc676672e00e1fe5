"""A comparison as it could have been: curves that rise to a ceiling, at the pace of each method's steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.tools.bench.machine import Machine
from hvd_compress.tools.compare.job import Goal, Outcome, Point
from hvd_compress.tools.compare.results import Comparison, Failure

STEPS, EVERY, GRADIENT = 800, 20, 33_628_200
MACHINE = Machine(
    "Some CPU @ 2.50GHz", 16, 64 << 30, "Some Linux 12", "6.1.0", "3.11.2", {"horovod": "0.28.1", "torch": "2.8.0"}
)


class Example(NamedTuple):
    """A method: milliseconds of its step and of their parts, how fast and how far it learns, and the bytes it sends."""

    spec: str
    ms: float
    pace: float
    ceiling: float
    payload: float
    encode: float | None = None
    wait: float | None = None
    decode: float | None = None
    vnmse: float | None = None


ALONE = 48.0
METHODS = (
    Example("none", 2760, 1.0, 0.94, GRADIENT),
    Example("fp16", 1410, 1.0, 0.94, GRADIENT / 2),
    Example("topk:ratio=0.01", 124, 0.55, 0.925, 672_564, 11.5, 43, 5.2, 0.62),
    Example("powersgd:rank=4", 143, 0.8, 0.938, 561_000, 19.2, 61, 8.1, 0.31),
    Example("qsgd:bits=4,bucket=512", 980, 0.93, 0.937, 4_335_000, 22.3, 858, 47.0, 0.043),
    Example("int8", 1460, 1.0, 0.939, 16_900_000, 31.0, 1340, 30.0, 0.0004),
)
MANY = (
    *METHODS,
    Example("homomorphic:density=0.05,dense=fp16,min=9", 600, 0.7, 0.93, 2_300_000, 30, 480, 40, 0.11),
    Example("signum:momentum=0.9,vectors=on,dense=fp1", 190, 0.35, 0.89, 1_051_000, 8, 120, 9, 1.4),
    Example("dgc:ratio=0.001,warmup=400,clip_norm=0.5", 96, 0.3, 0.915, 67_256, 21, 20, 4, 0.92),
    Example("loco:bits=4,feedback=ef21,every=100,st=10", 520, 0.9, 0.936, 4_300_000, 25, 420, 22, 0.09),
)


def curve(example: Example, seed: int, budget: float, perplexity: bool) -> list[Point]:
    """Evaluations as long as the budget lasts."""
    random = np.random.default_rng([seed, len(example.spec), int(example.ms)])
    pace, found = example.pace * random.uniform(0.93, 1.07) / 90, []
    for step in range(0, STEPS + 1, EVERY):
        learned = 1 - math.exp(-step * pace)
        accuracy = 0.1 + (example.ceiling - 0.1) * learned + (random.normal(0, 0.004) if step else 0)
        metric = math.exp(9.2 - 5.2 * accuracy) if perplexity else accuracy
        found.append(Point(step, step * example.ms / 1000 * (1 + 0.01 * seed), metric))
        if found[-1].seconds >= budget:
            break
    return found


def _s(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


def outcome(example: Example, seed: int = 0, budget: float = 600.0, **changes: Any) -> Outcome:
    """A training."""
    perplexity = changes.pop("perplexity", False)
    goal = (
        Goal("perplexity", False, 95.0, STEPS, GRADIENT // 4) if perplexity else Goal("accuracy", True, 0.9, STEPS, 1)
    )
    points = curve(example, seed, budget, perplexity)
    made = Outcome(
        example.spec, seed, None, goal, points, points[-1].step, points[-1].seconds, example.ms / 1000, ALONE / 1000,
        _s(example.encode), _s(example.wait), _s(example.decode), GRADIENT, example.payload,
        1.5 * example.payload + 2000, 700_000_000 + int(2 * example.payload), False, True,
    )  # fmt: skip
    return made._replace(**changes)


def comparison(methods: Sequence[Example] = METHODS, seeds: int = 3, **changes: Any) -> Comparison:
    """All of them; by ``perplexity`` instead of accuracy, with so many seconds of ``budget``, with fields changed."""
    perplexity, budget = changes.pop("perplexity", False), changes.pop("budget", 600.0)
    made = Comparison(
        "cnn" if not perplexity else "language", "torch", "4 emulated hosts, 100mbit", 4,
        f"hvd-compress compare {' '.join(one.spec for one in methods)} --task cnn --hosts 4 --rate 100mbit", MACHINE,
        "2025-11-22T01:41:00+00:00", {"budget": budget, "epochs": 10, "merge": 2, "momentum": True},
        [one.spec for one in methods], seeds, 95.0 if perplexity else 0.9,
        [outcome(one, seed, budget, perplexity=perplexity) for one in methods for seed in range(seeds)], [],
        {one.spec: one.vnmse for one in methods if one.vnmse is not None}, [],
    )  # fmt: skip
    return made._replace(**changes)


def troubled() -> Comparison:
    """With learning rates that were tried, a method that diverges, one that fails, and one that never gets there."""
    made = comparison((*METHODS, *MANY[-3:]))
    outcomes = [one._replace(lr=0.1 if one.spec.startswith("dgc") else 0.05) for one in made.outcomes]
    outcomes = [one for one in outcomes if not one.spec.startswith("loco")]
    outcomes = [_diverging(one) if one.spec == "int8" and one.seed else one for one in outcomes]
    tried = [one._replace(lr=0.2, diverged=one.spec == "none") for one in outcomes if one.seed == 0]
    lost = [
        Failure(MANY[-1].spec, seed, 0.05, "horovodrun ended with status 1; it printed:\n<out> of memory")
        for seed in range(3)
    ]
    return made._replace(outcomes=outcomes, tried=tried, failures=lost)


def _diverging(one: Outcome) -> Outcome:
    points = [*one.curve[:9], one.curve[9]._replace(metric=math.nan)]
    return one._replace(curve=points, steps=points[-1].step, seconds=points[-1].seconds, diverged=True)
