"""The course of a comparison: the trainings, their order, and their results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

from hvd_compress.engine.spec import parse
from hvd_compress.errors import ClusterError
from hvd_compress.local.settings import method_of
from hvd_compress.methods.wrappers.router import Auto
from hvd_compress.tools.bench.distributed.results import BASELINES
from hvd_compress.tools.bench.jobs import LaunchSpec, execute
from hvd_compress.tools.bench.machine import Machine
from hvd_compress.tools.compare.job import Goal, Job, Outcome, Point
from hvd_compress.tools.compare.measures import final, reach
from hvd_compress.tools.compare.progress import Bars
from hvd_compress.tools.compare.request import Request
from hvd_compress.tools.compare.results import Comparison, Failure, outcome_of
from hvd_compress.tools.compare.store import Store

WORKERS = {name: f"hvd_compress.tools.compare.{name}_worker" for name in ("torch", "keras", "ddp")}

MEASURED_STEPS = 50
"""Steps of the training that measures the error of a method's sums."""

_GRACE = 1800.0
"""Seconds that a job may take beyond its budget: for starting, evaluating and steps longer than expected."""


class ComparisonRun:
    """The trainings of a comparison, in their order."""

    def __init__(self, request: Request, store: Store, watch: Bars) -> None:
        self._request, self._store, self._watch = request, store, watch
        self._failures: list[Failure] = []
        self._begun = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._machine = Machine.here()

    def run(self, after_each: Callable[[Comparison], None]) -> Comparison | None:
        """Do all trainings.

        Seeds take turns, so that noise of the machine affects all methods equally.

        Args:
            after_each: Given what is known whenever a training has ended.

        Returns:
            All that is known; None if nothing is.
        """
        found = None
        for job in self._jobs():
            if self._done(job) and (found := self.known()):
                after_each(found)
        for spec in self._request.methods:
            method = parse(method_of(spec))
            if not (method.linear or isinstance(method, Auto) or "@" in spec):
                self._measure(spec)
        return self.known()

    def _jobs(self) -> Iterator[Job]:
        """Yield the trainings: first all learning rates with the first seed, then the best one with the others."""
        request = self._request
        for spec in request.methods:
            for lr in request.lrs:
                yield request.job(spec, 0, lr)
        for seed in range(1, request.seeds):
            for spec in request.methods:
                if best := self._best(spec):
                    yield request.job(spec, seed, best.lr)

    def _best(self, spec: str) -> Outcome | None:
        """Return the learning rate that reaches the target first, or else has the best metric at the end."""
        tried = [self._store.outcome(self._request.job(spec, 0, lr)) for lr in self._request.lrs]
        known = [one for one in tried if one is not None]
        return best_of(known, self._request.target) if known else None

    def _done(self, job: Job) -> bool:
        """Do a training, unless it has been done; return whether there is something new."""
        self._watch.begins(job, "training")
        outcome = self._store.outcome(job)
        if outcome is not None:
            self._watch.ends(job, outcome, "", fresh=False)
            return False
        try:
            facts = self._execute(job, self._request.where)
        except ClusterError as error:
            if parse(method_of(job.spec)).linear:
                raise  # Horovod's own: it is not the method that is at fault, and others would fail, too
            self._failures.append(Failure(job.spec, job.seed, job.lr, str(error)))
            self._watch.ends(job, None, str(error), fresh=True)
            return False
        outcome = outcome_of(facts["outcome"])
        self._store.keep(outcome)
        self._watch.ends(job, outcome, "", fresh=True)
        return True

    def _measure(self, spec: str) -> None:
        """Measure the error of a method's sums, which costs uncompressed exchanges and is done without a limit."""
        if self._store.measured(spec):
            return
        best = self._best(spec)
        job = self._request.job(spec, 0, best.lr if best else None)._replace(measured=MEASURED_STEPS)
        self._watch.begins(job, "measuring the error")
        where = self._request.where
        try:
            facts = self._execute(job, where._replace(rate="unlimited") if where.hosts else where)
        except ClusterError as error:
            self._failures.append(Failure(spec, 0, job.lr, f"measuring the error: {error}"))
            self._watch.ends(job, None, str(error), fresh=True)
            return
        self._store.keep_vnmse(spec, facts["vnmse"])
        self._watch.ends(job, None, "", fresh=True)

    def _execute(self, job: Job, where: LaunchSpec) -> dict[str, Any]:
        """Run a job, and return the last entry of each kind in its log.

        Raises:
            ClusterError: If it fails, or ends without a result.
        """
        log = self._store.log()
        job = job._replace(log=str(log.resolve()))
        wanted = "vnmse" if job.measured else "outcome"

        def look() -> None:
            known = _read(log.read_text())
            goal = Goal(**known["goal"]) if "goal" in known else None
            step, seconds, metric = known.get("point", (0, 0.0, None))
            self._watch.moves(job, goal, None if metric is None else Point(step, seconds, metric))

        try:
            program = ["-m", WORKERS[self._request.framework], job.to_json()]
            execute(program, where, look, job.budget + _GRACE)
            known = _read(log.read_text())
        finally:
            log.unlink()
        if wanted not in known:
            raise ClusterError(f"the training with {job.spec} ended without a result: rank 0 has not written {log}")
        return known

    def known(self) -> Comparison | None:
        """Return what is known so far; None if no training has ended."""
        request = self._request
        best = {spec: one.lr for spec in request.methods if (one := self._best(spec))}
        outcomes = [
            one
            for spec, lr in best.items()
            for seed in range(request.seeds)
            if (one := self._store.outcome(request.job(spec, seed, lr)))
        ]
        tried = [
            one
            for spec in request.methods
            for lr in request.lrs
            if lr != best.get(spec) and (one := self._store.outcome(request.job(spec, 0, lr)))
        ]
        if not outcomes:
            return None
        return Comparison(
            task=request.task,
            framework=request.framework,
            where=str(request.where),
            size=request.where.size,
            command=request.command(str(self._store.folder)),
            machine=self._machine,
            begun=self._begun,
            conditions=request.conditions | {"where": str(request.where)},
            methods=request.methods,
            seeds=request.seeds,
            target=_target(request.target, outcomes),
            outcomes=outcomes,
            tried=tried,
            vnmse={s: error for s in request.methods if (error := self._store.vnmse(s)) is not None},
            failures=self._failures,
        )


def best_of(outcomes: list[Outcome], target: float | None) -> Outcome:
    """Return which reaches the target first; where none does, which has the best metric at its end."""
    goal = outcomes[0].goal
    target = goal.target if target is None else target
    found = [None if target is None else reach(one, target) for one in outcomes]
    reached = [(there.seconds, n) for n, there in enumerate(found) if there]
    if reached:
        return outcomes[min(reached)[1]]
    sign = 1.0 if goal.higher_is_better else -1.0
    ends = [(sign * final(one), -n) for n, one in enumerate(outcomes) if math.isfinite(final(one))]
    return outcomes[-max(ends)[1]] if ends else outcomes[0]


def _target(asked: float | None, outcomes: list[Outcome]) -> float:
    """Return the target that was asked for, else the task's, else the worst end of the better of none and fp16."""
    if asked is not None:
        return asked
    goal = outcomes[0].goal
    if goal.target is not None:
        return goal.target
    better, worse = (max, min) if goal.higher_is_better else (min, max)
    own = [[one.curve[-1].metric for one in outcomes if one.spec == spec] for spec in BASELINES]
    return better([worse(ends) for ends in own if ends] or [outcomes[0].curve[-1].metric])


def _read(log: str) -> dict[str, Any]:
    """Return the last line of each kind."""
    known: dict[str, Any] = {}
    for line in log.split("\n")[:-1]:
        known |= json.loads(line)
    return known
