"""Starts the workers, on emulated hosts or on this machine, and collects what they report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import NamedTuple

from hvd_compress.bench.speed.task import Part, Task, read_report
from hvd_compress.cluster import Cluster
from hvd_compress.errors import ClusterError

WORKERS = {"torch": "torch_worker", "keras": "keras_worker"}

CONTROLLERS = {
    "gloo": ["--gloo"],
    # Open MPI 5 does not know the options by which horovodrun binds ranks to cores.
    "mpi": ["--mpi", "--binding-args=--bind-to none --map-by slot"],
}

ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"), "1"),
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "-1",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # there may be more ranks than cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
"""A rank has one thread for its arithmetic."""

TIME_LIMIT = 3600.0
"""Seconds after which a job hangs."""

_LINES = 20


class Where(NamedTuple):
    """What the ranks run on.

    Attributes:
        hosts: How many emulated hosts, of one rank each; 0 for this machine.
        rate: Of the hosts.
        ranks: On this machine.
        controller: Of Horovod, on this machine: ``"gloo"`` or ``"mpi"``.
    """

    hosts: int
    rate: str
    ranks: int
    controller: str

    @property
    def size(self) -> int:
        """How many ranks."""
        return self.hosts or self.ranks

    def __str__(self) -> str:
        if self.hosts:
            return f"{self.hosts} emulated hosts, {self.rate}"
        return f"{self.ranks} rank{'s' if self.ranks != 1 else ''} on this machine, {self.controller}"


def run(task: Task, framework: str, where: Where, watch: Callable[[int], None]) -> list[list[Part]]:
    """Run a task.

    Args:
        task: What to measure; its folder for reports is chosen here.
        framework: A key of `WORKERS`.
        where: What the ranks run on.
        watch: Called again and again with how many parts are done.

    Returns:
        The report of each rank.

    Raises:
        ClusterError: If the hosts cannot be made, or the job fails.
    """
    with tempfile.TemporaryDirectory(prefix="hvd-compress-bench-") as folder:
        task = task._replace(reports=folder)
        written = Path(folder, "task.json")
        task.write(written)
        command = [sys.executable, "-m", f"hvd_compress.bench.speed.{WORKERS[framework]}", str(written)]

        def look() -> None:
            watch(len(read_report(task.report(0))))

        failed, output = (_on_hosts if where.hosts else _here)(command, where, look)
        if failed:
            raise ClusterError(f"{failed}; it printed:\n{_tail(output)}")
        return [read_report(task.report(rank)) for rank in range(where.size)]


def _on_hosts(command: Sequence[str], where: Where, look: Callable[[], None]) -> tuple[str, str]:
    with Cluster(where.hosts, where.rate) as cluster:
        ended = cluster.launch(command, ENVIRONMENT, timeout=TIME_LIMIT, watch=look)
    worst = max(ended, key=lambda one: (one.code > 0, one.code < 0))  # the one that failed, not those ended for it
    return (f"the rank on {worst.host} ended with status {worst.code}" if worst.code else ""), worst.output


def _here(command: Sequence[str], where: Where, look: Callable[[], None]) -> tuple[str, str]:
    folder = Path(sys.executable).parent
    start = [str(folder / "horovodrun"), *CONTROLLERS[where.controller], "-np", str(where.ranks)]
    environment = {**os.environ, **ENVIRONMENT, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    with tempfile.TemporaryFile() as output:
        job = subprocess.Popen(
            [*start, "-H", f"localhost:{where.ranks}", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the job
        )
        try:
            deadline = time.monotonic() + TIME_LIMIT
            while job.poll() is None and time.monotonic() < deadline:
                look()
                time.sleep(0.1)
        finally:
            _end(job)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return (f"horovodrun ended with status {job.returncode}" if job.returncode else ""), text


def _end(job: subprocess.Popen[bytes]) -> None:
    for kind in (SIGTERM, SIGKILL):  # horovodrun passes the first on to the ranks
        if job.poll() is None:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(job.pid, kind)
                job.wait(10)


def _tail(output: str) -> str:
    """The last lines that ranks wrote; those of horovodrun itself only if there are no others."""
    lines = [line for line in output.splitlines() if line.strip()]
    lines = [line for line in lines if re.match(r"\[\d+(,\d+)?\]<std", line)] or lines
    return "\n".join(lines[-_LINES:])
