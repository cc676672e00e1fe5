"""Trials: one step on two ranks of this machine, for each framework and each controller."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from hvd_compress.tools.cluster.job import Process, follow
from hvd_compress.tools.doctor.cures import OPEN_MPI_5, Cure
from hvd_compress.tools.doctor.facts import TITLES, Facts, Framework, environment, search_path
from hvd_compress.tools.doctor.rules import Finding, needs_binding, usable
from hvd_compress.tools.doctor.trial import MARK

_LINES = 5
"""Lines that are shown of the output of a failed job."""

_QUIET = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
"""There may be more ranks than cores, and the output is to be short."""

_RANK = re.compile(r"^\[(?:\d+,)?(\d+)\]<std(?:out|err)>: ?(.*)$", re.MULTILINE)
"""A line of a rank, as horovodrun (Gloo) and Open MPI mark it."""

_FAILED = re.compile(r"^ *Process name: (?:\[.*,)?(\d+)", re.MULTILINE)
"""Both say which rank ended first, and not well."""


class Trial(NamedTuple):
    """The result of a trial."""

    framework: str
    controller: str  # ``"gloo"`` or ``"mpi"``
    works: bool
    message: str  # What was enabled, or the last lines that the job printed


def jobs(facts: Facts) -> list[tuple[Framework, str]]:
    """Return what can be tried: usable frameworks, with the controllers that Horovod has and that can be started."""
    able = [framework for framework in facts.frameworks if framework.name in usable(facts) and facts.horovodrun]
    controllers = ("gloo", "mpi") if facts.mpirun else ("gloo",)
    found = [(framework, name) for framework in able for name in controllers if name in framework.built]
    return [*found, *([(Framework("ddp"), "gloo")] if "ddp" in usable(facts) else [])]


def command(facts: Facts, framework: str, controller: str) -> list[str]:
    program = ["-m", "hvd_compress.tools.doctor.trial", framework]
    if framework == "ddp":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program]
    binding = [OPEN_MPI_5] if controller == "mpi" and needs_binding(facts) else []
    start = [str(facts.horovodrun), f"--{controller}", *binding, "-np", "2", "-H", "localhost:2"]
    return [*start, sys.executable, *program]


def attempt(facts: Facts, framework: str, controller: str, timeout: float) -> Trial:
    """Run one trial; a job that hangs is ended."""
    variables = {**environment(), "PATH": search_path(), **_QUIET}
    begin = time.monotonic()
    (ended,) = follow([Process("", command(facts, framework, controller), variables)], timeout, lambda: None)
    if ended.code and time.monotonic() - begin >= timeout:
        return Trial(framework, controller, False, f"{_tail(ended.output)}\nended after {timeout:g} s")
    return read(framework, controller, ended.code, ended.output)


def read(framework: str, controller: str, status: int, output: str) -> Trial:
    """Read the result from what a job printed."""
    _, found, said = output.partition(MARK)
    if status or not found:
        return Trial(framework, controller, False, _tail(output) or f"the job ended with status {status}")
    facts: dict[str, Any] = json.loads(said.splitlines()[0])
    return Trial(framework, controller, True, f"a step on {facts['ranks']} ranks is exact ({facts['controller']})")


def findings(facts: Facts, done: list[Trial]) -> Iterator[Finding]:
    for framework, controller, works, message in done:
        subject = f"Run: {TITLES[framework]}, {'MPI' if controller == 'mpi' else 'Gloo'}"
        if works:
            yield Finding("ok", subject, message)
        else:
            started = " ".join(f'"{part}"' if " " in part else part for part in command(facts, framework, controller))
            yield Finding("fault", subject, message, Cure("start it by hand, to see all that it prints", started))


def _tail(output: str) -> str:
    """Return the last lines of the rank that failed first; of horovodrun only if no rank printed anything."""
    ranks = [match.groups() for match in _RANK.finditer(output) if match[2].strip()]
    failed = _FAILED.search(output)
    of_one = [line for rank, line in ranks if failed is None or rank == failed[1]]
    lines = of_one or [line for _, line in ranks] or output.split("\n")
    return "\n".join([line.rstrip() for line in lines if line.strip()][-_LINES:])
