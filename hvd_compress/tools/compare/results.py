"""The results of a comparison: the contents of ``results.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvd_compress.tools.bench.machine import Machine
from hvd_compress.tools.compare.job import Goal, Outcome, Point


def named(spec: str) -> str:
    """Name a method in a sentence, where ``none`` could be read as the word."""
    return "none (no compression)" if spec == "none" else spec


class Failure(NamedTuple):
    """A training that failed."""

    spec: str
    seed: int
    lr: float | None
    message: str


class Comparison(NamedTuple):
    """The results of a comparison."""

    task: str
    framework: str
    where: str  # The hosts and ranks, in words
    size: int
    command: str  # The command that does it again
    machine: Machine
    begun: str  # The time, as ISO 8601
    conditions: dict[str, Any]  # All other settings by name, as budget, epochs, merge
    methods: list[str]  # The specs, in the order in which they were named; `BASELINES` are among them
    seeds: int
    target: float  # The metric that is good enough
    outcomes: list[Outcome]  # With the best learning rate of each method, for each seed; those that failed are missing
    tried: list[Outcome]  # With the other learning rates, and the first seed
    vnmse: dict[str, float]  # The error of the compressed sums by spec, where it was measured
    failures: list[Failure]  # What could not be done

    @property
    def goal(self) -> Goal:
        return self.outcomes[0].goal

    def of(self, spec: str) -> list[Outcome]:
        """Return the outcomes of a method, by seed."""
        return sorted((one for one in self.outcomes if one.spec == spec), key=lambda one: one.seed)

    def write(self, path: Path) -> None:
        """Write `facts` as JSON."""
        write_whole(path, json.dumps(self.facts(), indent=1) + "\n")

    def facts(self) -> dict[str, Any]:
        """Return everything, ready for JSON; numbers that are not finite are None."""
        return self._asdict() | {
            "machine": self.machine._asdict(),
            "outcomes": [outcome_facts(one) for one in self.outcomes],
            "tried": [outcome_facts(one) for one in self.tried],
            "failures": [one._asdict() for one in self.failures],
        }

    @classmethod
    def read(cls, path: Path) -> Comparison:
        found = json.loads(path.read_text())
        return cls(
            **found
            | {
                "machine": Machine(**found["machine"]),
                "outcomes": [outcome_of(one) for one in found["outcomes"]],
                "tried": [outcome_of(one) for one in found["tried"]],
                "failures": [Failure(**one) for one in found["failures"]],
            }
        )


def outcome_facts(outcome: Outcome) -> dict[str, Any]:
    curve = [[p.step, p.seconds, p.metric if math.isfinite(p.metric) else None] for p in outcome.curve]
    return outcome._asdict() | {"goal": outcome.goal._asdict(), "curve": curve}


def outcome_of(facts: dict[str, Any]) -> Outcome:
    curve: Sequence[Any] = facts["curve"]
    points = [Point(step, seconds, math.nan if metric is None else metric) for step, seconds, metric in curve]
    return Outcome(**facts | {"goal": Goal(**facts["goal"]), "curve": points})


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that it is there as a whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    part.replace(path)
