"""Start programs under horovodrun or mpirun, as users do."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvd_compress.tools.bench.jobs import CONTROLLERS, LAUNCHER

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "",
    # A rank that waits gives way: there may be more ranks than cores.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # One buffer for each tensor, so that sums are formed in one order whatever the timing: bits can be compared.
    "HOROVOD_FUSION_THRESHOLD": "0",
}


NOT_STARTED = "The PMIx server's listener thread failed to start"
"""What mpirun says when it could not open its own socket: it ends before there is any rank."""

ATTEMPTS = 3

NODES = ["localhost", "127.0.0.1", "127.1"]
"""Names of this machine: horovodrun takes them for several nodes."""

AS_NODE = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
name=$1; shift
exec unshare --map-root-user --uts sh -c "hostname $name; $*"
"""
"""Starts a program of mpirun on this machine under the name of a node."""

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Containers run tests as root."""


def run(
    command: Sequence[str | Path],
    timeout: float,
    environment: Mapping[str, str] | None = None,
    folder: str | Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a launcher with the programs of this Python's environment; again if mpirun itself could not begin.

    Launchers that run at the same time get temporary folders of their own, as they leave files there.
    """
    bin_folder = Path(sys.executable).parent
    variables = {**os.environ, **ENVIRONMENT, **(environment or {}), "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryDirectory(prefix="run") as temporary:
            result = subprocess.run(
                [str(part) for part in command],
                cwd=folder,
                env={**variables, "TMPDIR": temporary},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout,
            )
        if not result.returncode or NOT_STARTED not in result.stdout:
            break
    return result


def horovodrun(
    ranks: int,
    controller: str,
    *arguments: str | Path,
    timeout: float = 300,
    check: bool = True,
    environment: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    nodes: Sequence[int] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a Python program on several ranks of this machine.

    Args:
        ranks: How many processes.
        controller: ``"gloo"`` or ``"mpi"``.
        *arguments: Of the Python interpreter.
        timeout: Seconds after which a job that hangs is ended.
        check: Fail, with the output in the message, if the program fails.
        environment: Added to that of this process.
        options: More options of horovodrun; those of an elastic job, which has a list of hosts of its own.
        nodes: Numbers of ranks of several nodes; empty for a single node.

    Returns:
        Exit code and output; the output of all ranks is in ``stdout``.
    """
    if nodes:
        hosts = ["-H", ",".join(f"{name}:{count}" for name, count in zip(NODES, nodes, strict=False))]
    else:
        hosts = list(options) or ["-H", f"localhost:{ranks}"]
    if nodes and controller == "mpi":
        return mpirun(nodes, [sys.executable, *arguments], timeout, check, environment)
    launcher = [*LAUNCHER, *CONTROLLERS[controller], "-np", str(ranks), *hosts]
    result = run([*launcher, sys.executable, *arguments], timeout, environment)
    if check and result.returncode:
        raise AssertionError(f"horovodrun ended with {result.returncode}:\n{result.stdout}")
    return result


def mpirun(
    nodes: Sequence[int],
    command: Sequence[str | Path],
    timeout: float = 300,
    check: bool = True,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program on several nodes, all of them this machine; see `horovodrun`."""
    with tempfile.TemporaryDirectory() as folder:
        agent = Path(folder, "agent")
        agent.write_text(AS_NODE)
        agent.chmod(0o755)
        hosts = ",".join(f"h{number}:{count}" for number, count in enumerate(nodes, start=1))
        launcher = ["mpirun", "-np", str(sum(nodes)), "-H", hosts, "--bind-to", "none", "--map-by", "slot"]
        variables = {**AS_ROOT, "PRTE_MCA_plm_ssh_agent": str(agent), **(environment or {})}
        exported = [part for name in (*ENVIRONMENT, *variables, "PATH", "PYTHONPATH") for part in ("-x", name)]
        over = ["-mca", "btl_tcp_if_include", "lo"]
        result = run([*launcher, *over, *exported, *command], timeout, variables)
    if check and result.returncode:
        raise AssertionError(f"mpirun ended with {result.returncode}:\n{result.stdout}")
    return result


def torchrun(ranks: int, *arguments: str | Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a Python program on several ranks of this machine, without Horovod, and fail if it fails.

    Args:
        ranks: How many processes.
        *arguments: The program and its arguments.
        timeout: Seconds after which a job that hangs is ended.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    result = run([*launcher, *arguments], timeout)
    if result.returncode:
        raise AssertionError(f"torchrun ended with {result.returncode}:\n{result.stdout}")
    return result
