"""Jobs on this machine that cost little to start: ranks are forked from a process that has imported the framework."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from launching import ENVIRONMENT
from soak.schedules.diary import read
from soak.schedules.judge import Process
from soak.schedules.rank import Order
from soak.schedules.schedule import Framework

LIMITS: dict[Framework, float] = {"torch": 180.0, "keras": 240.0}
"""Seconds until a job is said to hang."""


def forge(framework: Framework) -> ForkServerContext:
    """Give what starts processes that have imported a framework already; one for this process."""
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"soak.schedules.{framework}_job"])
    first = context.Process(target=os.getpid)  # the first one waits until everything has been imported
    first.start()
    first.join()
    return context


@contextmanager
def rendezvous(ranks: int) -> Iterator[int]:
    """Serve one job's ranks, which find each other there; gives the port."""
    hosts = import_module("horovod.runner.common.util.hosts")
    server = import_module("horovod.runner.http.http_server").RendezvousServer()
    port: int = server.start()
    server.init(hosts.get_host_assignments(hosts.parse_hosts(f"localhost:{ranks}"), ranks))
    try:
        yield port
    finally:
        server.stop()


def environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables by which horovodrun tells a process of Gloo which rank it is."""
    own = {"RANK": rank, "SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_SIZE": ranks, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    gloo = {
        "HOSTNAME": "localhost",
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "GLOO_RENDEZVOUS_PORT": port,
        "GLOO_IFACE": "lo",
        "GLOO_TIMEOUT_SECONDS": 20,
    }
    return {f"HOROVOD_{name}": str(value) for name, value in (own | gloo).items()}


def launch(context: ForkServerContext, order: Order) -> list[Process]:
    """Run a job to its end; ranks that hang are ended.

    Args:
        context: From `forge`.
        order: For all of its ranks; rank and environment are filled in here.
    """
    run = import_module("soak.schedules.entry").ENTRIES[order.framework]
    ranks = order.segment.ranks
    with rendezvous(ranks) as port:
        orders = [order._replace(rank=r, environment=environment(r, ranks, port)) for r in range(ranks)]
        processes = [context.Process(target=run, args=(one,)) for one in orders]
        for process in processes:
            process.start()
        _wait(processes, order.limit)
    return [_gather(order.folder, rank, process) for rank, process in enumerate(processes)]


def _wait(processes: Sequence[ForkServerProcess], limit: float) -> None:
    """Wait for all; end those that take too long."""
    deadline = time.monotonic() + limit
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGTERM)
            process.join()


def _gather(folder: Path, rank: int, process: ForkServerProcess) -> Process:
    output = folder / f"rank{rank}.out"
    code = None if process.exitcode == -signal.SIGTERM else process.exitcode
    entries = read(folder / f"rank{rank}.diary")
    return Process(code, entries, output.read_text(errors="replace") if output.exists() else "")
