"""Predictions against measurements on emulated hosts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hvd_compress.engine.spec import parse
from hvd_compress.errors import SpecError
from hvd_compress.tools.advise.constants import Constants
from hvd_compress.tools.advise.model import Framework, Setup, predict
from hvd_compress.tools.advise.rates import Rates
from hvd_compress.tools.bench.distributed.results import results
from hvd_compress.tools.bench.distributed.shapes import SHAPES, WIDTH, count
from hvd_compress.tools.bench.distributed.task import Measured as Worker
from hvd_compress.tools.bench.distributed.task import Task, entries, run
from hvd_compress.tools.bench.jobs import LaunchSpec, choose_launcher
from hvd_compress.tools.bench.machine import Machine
from hvd_compress.tools.units import read_rate

METHODS = ("none", "fp16", "topk:ratio=0.01", "topkc:ratio=0.01", "powersgd:rank=4", "efsignsgd", "qsgd")
MODEL, MERGE = "linear", 2
FITTED = (2, 8)
"""Hosts whose measurements constants are fitted to; the others tell whether they are true elsewhere."""

GOOD = 0.2
"""An error that is small enough."""


class Measured(NamedTuple):
    """The measurements of a job."""

    hosts: int  # Emulated hosts, of one rank each
    link: str  # The bandwidth of each, as ``"100mbit"``
    cores: int  # Cores of the machine, which all hosts share
    compute: float  # Seconds of a step alone, measured in the same job
    steps: Mapping[str, float]  # Seconds of a step, by spec
    traffic: Mapping[str, float]  # Bytes at the network device of the busiest host in each step, by spec
    framework: Framework = "horovod"  # What exchanged gradients


class Campaign(NamedTuple):
    """All measurements."""

    machine: str
    rates: Rates
    jobs: Sequence[Measured]

    @property
    def framework(self) -> Framework:
        """System that exchanged gradients, the same in all jobs."""
        return self.jobs[0].framework

    def facts(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        jobs = [job._asdict() for job in self.jobs]
        return {"machine": self.machine, "rates": self.rates.as_json(), "jobs": jobs}

    @classmethod
    def read(cls, path: Path) -> Campaign:
        """Read `facts` from a file.

        Raises:
            SpecError: If it is something else.
        """
        try:
            facts = json.loads(path.read_text())
            jobs = [Measured(**job) for job in facts["jobs"]]
            (_,) = {job.framework for job in jobs}
            return cls(facts["machine"], Rates.from_json(facts["rates"]), jobs)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SpecError(
                f"measured={str(path)!r} cannot be read ({type(error).__name__}: {error}); it must be a file that"
                " 'python tools/advise_validation --json FILE' has written"
            ) from None


class Cell(NamedTuple):
    """One method in one job."""

    hosts: int  # Emulated hosts, of one rank each
    link: str  # The bandwidth of each
    spec: str
    measured: float  # Seconds of a step
    predicted: float  # Seconds that the model predicts
    traffic: float = 0.0  # Bytes at the network device in each step
    wire: float = 0.0  # Bytes that the model predicts

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


def measure_job(hosts: int, link: str, steps: int, framework: Framework = "horovod") -> Measured:
    """Measure whole steps of all methods, which take turns.

    Raises:
        ClusterError: If there can be no emulated hosts, or the job fails.
    """
    worker: Worker = "torch" if framework == "horovod" else framework
    ours = [spec for spec in METHODS if not parse(spec).linear]
    rows = entries(ours, [MERGE], [framework], worker)
    compared = [row for row in rows if not row.spec or (row.driver == framework and row.spec in METHODS)]
    task = Task("steps", MODEL, compared, steps, 1, 0, "")
    where = LaunchSpec(hosts, link, 0, choose_launcher(None, task.needs_horovod))
    found = results(task, run(task, worker, where, lambda done: None), None)
    by_spec = {entry.spec: result for entry, result in zip(compared, found, strict=True)}
    alone = by_spec.pop("")
    seconds = {spec: result.ms / 1000 for spec, result in by_spec.items()}
    traffic = {spec: result.device or 0.0 for spec, result in by_spec.items()}
    return Measured(hosts, link, Machine.here().cores, alone.ms / 1000, seconds, traffic, framework)


def setup_of(job: Measured) -> Setup:
    """Return a job as the model sees it; the latency of an emulated network is part of a message's cost to the host."""
    shapes = SHAPES[MODEL]()
    vectors = sum(prod(shape) for shape in shapes if len(shape) == 1) / count(shapes)
    return Setup(
        params=count(shapes),
        ranks=job.hosts,
        rate=read_rate("rate", job.link),
        compute=job.compute,
        latency=0.0,
        merge=MERGE,
        cores_per_rank=job.cores / job.hosts,
        side=WIDTH,
        vectors=vectors,
        framework=job.framework,
    )


def compare(jobs: Sequence[Measured], rates: Rates, constants: Constants) -> list[Cell]:
    """Predict what was measured.

    A step alone does not depend on the link, so that it is known best from all jobs with as many hosts: their median.
    """
    alone = {n: median(job.compute for job in jobs if job.hosts == n) for n in {job.hosts for job in jobs}}
    cells = []
    for job in jobs:
        setup = setup_of(job._replace(compute=alone[job.hosts]))
        for spec, seconds in job.steps.items():
            found = predict(spec, setup, rates, constants)
            cells.append(Cell(job.hosts, job.link, spec, seconds, found.step, job.traffic[spec], found.wire))
    return cells


class Score(NamedTuple):
    """The quality of the predictions."""

    cells: int
    good: float  # The share whose error is at most `GOOD`
    median: float  # The median of the errors, whatever their signs
    worst: Cell


def score(cells: Sequence[Cell]) -> Score:
    """Return how good predictions are."""
    errors = [abs(cell.error) for cell in cells]
    worst = max(cells, key=lambda cell: abs(cell.error))
    return Score(len(cells), sum(error <= GOOD for error in errors) / len(cells), median(errors), worst)
