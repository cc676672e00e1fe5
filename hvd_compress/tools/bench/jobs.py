"""Run a program on all ranks: on emulated hosts, on this machine or on others."""

from __future__ import annotations

import importlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from signal import SIGTERM
from typing import Literal, NamedTuple

from hvd_compress.errors import BUILD_HOROVOD, ClusterError, MissingPackageError, SpecError
from hvd_compress.tools.cluster import Cluster
from hvd_compress.tools.cluster.job import Process, follow
from hvd_compress.tools.cluster.rates import bits_per_second
from hvd_compress.tools.ranks.process import Device
from hvd_compress.tools.units import UNLIMITED, counted

Framework = Literal["torch", "keras"]
Controller = Literal["gloo", "mpi"]
"""Horovod's controllers: the libraries it communicates by."""

Launcher = Literal["gloo", "mpi", "torchrun"]
"""What starts the ranks: horovodrun with one of these controllers, or torchrun, without Horovod."""

CONTROLLERS = {
    "gloo": ["--gloo"],
    # Open MPI 5 does not know the options by which horovodrun binds ranks to cores.
    "mpi": ["--mpi", "--binding-args=--bind-to none --map-by slot"],
}

ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"), "1"),
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
"""On this machine, a rank has one thread for its arithmetic."""

_NO_GPU = {"CUDA_VISIBLE_DEVICES": "-1"}

_MPI = {
    "OMPI_MCA_mpi_yield_when_idle": "1",  # there may be more ranks than cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}

LAUNCHER = [sys.executable, "-m", "hvd_compress.tools.bench.horovodrun"]

TIME_LIMIT = 3600.0
"""Seconds after which a job hangs."""

_LINES = 20

_OF_RANK = re.compile(r"\[(\d+(,\d+)?\]<std|default\d+\]:)")
"""Begins the lines of ranks in the output of horovodrun and of torchrun."""


class LaunchSpec(NamedTuple):
    """The hosts and ranks of a job."""

    hosts: int  # Emulated hosts; 0 for this machine
    rate: str  # The bandwidth of emulated hosts
    ranks: int  # Ranks, without emulated hosts
    launcher: Launcher
    on: str = ""  # Other machines and their slots, as ``horovodrun -H`` takes them; empty for this machine
    ranks_per_host: int = 1  # Ranks of each emulated host
    device: Device = "cpu"

    @property
    def size(self) -> int:
        return self.hosts * self.ranks_per_host or self.ranks

    def __str__(self) -> str:
        if self.hosts:
            each = f" with {self.ranks_per_host} ranks each" if self.ranks_per_host > 1 else ""
            return f"{self.hosts} emulated hosts{each}, {self.rate}"
        ranks = counted(self.ranks, "rank")
        gpus = " with a GPU each" if self.device == "cuda" else ""
        return f"{ranks}{gpus} on {self.on or 'this machine'}, {self.launcher}"


def choose_launcher(controller: Controller | None, needs_horovod: bool) -> Launcher:
    """Return torchrun where nothing needs Horovod and nobody names a controller of it."""
    return controller or ("gloo" if needs_horovod else "torchrun")


def read_where(
    hosts: int, rate: str | None, ranks_per_host: int, ranks: int | None, launcher: Launcher, on: str = ""
) -> LaunchSpec:
    """Read the hosts and ranks of a job from a command's options; by default 2 ranks, or all slots of ``on``.

    Raises:
        SpecError: If the rate is invalid, or something is given that these hosts would ignore.
    """
    link = UNLIMITED if rate is None else read_link(rate)
    if rate is not None and not hosts:
        raise SpecError(
            f"rate={rate!r} is not allowed without hosts: only the links of emulated hosts have a rate; add --hosts 2,"
            " or leave out --rate"
        )
    if on and hosts:
        raise SpecError(f"on={on!r} is not allowed with hosts={hosts}: emulated hosts are on this machine; name one")
    if ranks_per_host != 1 and not hosts:
        raise SpecError(
            f"ranks_per_host={ranks_per_host} is not allowed without hosts: it is for emulated hosts; add --hosts 2, or"
            " name machines and their ranks by --on h1:8,h2:8"
        )
    slots = _slots(on) if on else 2
    if on and ranks is not None and ranks > slots:
        raise SpecError(f"ranks={ranks} is not allowed with on={on!r}: these machines have {slots} slots")
    return LaunchSpec(hosts, link, slots if ranks is None else ranks, launcher, on, ranks_per_host)


def on_device(where: LaunchSpec, device: Device, framework: str) -> LaunchSpec:
    """Return the same hosts and ranks, computing on this device.

    Raises:
        SpecError: If these are emulated hosts, which would share GPUs, or another framework than PyTorch.
    """
    if device == "cuda" and framework == "keras":
        raise SpecError(f"device={device!r} is not allowed with framework='keras': GPUs are for torch, ddp and fsdp")
    if device == "cuda" and where.hosts:
        raise SpecError(
            f"device={device!r} is not allowed with hosts={where.hosts}: emulated hosts have no GPUs of their own;"
            " leave out --hosts and --rate, or take --device cpu"
        )
    return where._replace(device=device)


def _slots(on: str) -> int:
    """Return the number of ranks that machines take, as ``h1:8,h2:8``."""
    counts = [count for _, _, count in (host.rpartition(":") for host in on.split(","))]
    if not all(count.isdigit() and int(count) for count in counts):
        raise SpecError(f"on={on!r} is not allowed: name each machine with its number of ranks, such as h1:8,h2:8")
    return sum(map(int, counts))


def read_link(text: str) -> str:
    """Read the rate of an emulated link.

    Raises:
        SpecError: If there is none such.
    """
    try:
        bits_per_second(text)
    except ClusterError as error:
        raise SpecError(str(error)) from None
    return text


def execute(program: Sequence[str], where: LaunchSpec, watch: Callable[[], None], limit: float = TIME_LIMIT) -> None:
    """Run ``python PROGRAM ...`` on every rank, at most so many seconds; call ``watch`` again and again.

    Raises:
        ClusterError: If the hosts cannot be made, or the program fails.
        MissingPackageError: If Horovod is to start the ranks and is not installed.
    """
    if where.launcher != "torchrun":
        _require_horovod()
    command = [sys.executable, *program]
    failed, output = (_on_hosts if where.hosts else _here)(command, where, watch, limit)
    if failed:
        raise ClusterError(f"{failed}; it printed:\n{_tail(output)}")


def _on_hosts(command: Sequence[str], where: LaunchSpec, look: Callable[[], None], limit: float) -> tuple[str, str]:
    with Cluster(where.hosts, where.rate, where.ranks_per_host) as cluster:
        horovod = where.launcher != "torchrun"
        ended = cluster.launch(command, ENVIRONMENT | _NO_GPU, timeout=limit, watch=look, horovod=horovod)
    worst = max(ended, key=lambda one: (one.code > 0, one.code < 0))  # the one that failed, not those ended for it
    return (f"the rank on {worst.host} ended with status {worst.code}" if worst.code else ""), worst.output


def _here(command: Sequence[str], where: LaunchSpec, look: Callable[[], None], limit: float) -> tuple[str, str]:
    folder = Path(sys.executable).parent
    own = ({} if where.on else ENVIRONMENT) | (_NO_GPU if where.device == "cpu" else {})
    environment = {**os.environ, **own, **_MPI, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory(prefix="hvd-compress-logs-") as logs:
        command = [*_start(where, logs), *command]
        (ended,) = follow([Process("this machine", command, environment, orphaned=SIGTERM)], limit, look)
    name = "torchrun" if where.launcher == "torchrun" else "horovodrun"
    return (f"{name} ended with status {ended.code}" if ended.code else ""), ended.output


def _start(where: LaunchSpec, logs: str) -> list[str]:
    """Return the launcher of ranks; torchrun marks their lines only if it may keep them in files, too."""
    if where.launcher == "torchrun":
        options = ["--standalone", f"--nproc-per-node={where.ranks}", "--tee", "3", "--log-dir", logs, "--no-python"]
        return [sys.executable, "-m", "torch.distributed.run", *options]
    hosts = where.on or f"localhost:{where.ranks}"
    return [*LAUNCHER, *CONTROLLERS[where.launcher], "-np", str(where.ranks), "-H", hosts]


def _require_horovod() -> None:
    try:
        importlib.import_module("horovod")
    except ImportError as error:
        raise MissingPackageError(
            f"Horovod starts these ranks and cannot be imported ({error}): add --framework ddp, without --controller,"
            f" --on and --against horovod, which needs PyTorch alone; or {BUILD_HOROVOD}"
        ) from error


def _tail(output: str) -> str:
    """Return the last lines that ranks wrote; those of the launcher itself only if there are no others."""
    lines = [line for line in output.splitlines() if line.strip()]
    lines = [line for line in lines if _OF_RANK.match(line)] or lines
    return "\n".join(lines[-_LINES:])
