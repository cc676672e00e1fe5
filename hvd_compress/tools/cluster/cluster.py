"""The hosts, as a context manager."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType

from hvd_compress.errors import ClusterError
from hvd_compress.tools.cluster import network
from hvd_compress.tools.cluster.job import Finished, Process, end, follow
from hvd_compress.tools.cluster.network import Traffic
from hvd_compress.tools.cluster.rates import bits_per_second
from hvd_compress.tools.units import UNLIMITED

_PATIENCE = 60.0
"""Seconds for the rendezvous server to start: importing Horovod from a cold disk is slow."""

_MASTER_PORT = 29500
"""Where the first host serves the ranks of `torch.distributed`, as by default of torchrun."""


class Cluster:
    """Hosts ``h1``, ``h2`` ... on this machine, each with a network device of its own.

    ::

        with Cluster(hosts=4, rate="100mbit") as cluster:
            for host, code, output in cluster.launch([sys.executable, "train.py"]):
                print(host, code, output)

    Everything is removed at the end, and what an earlier run left that was killed at the beginning. The hosts share the
    machine's files, processors and memory.

    Args:
        hosts: How many.
        rate: What each may send and receive, as ``"100mbit"`` or ``"1gbit"``; or ``"unlimited"``.
        ranks_per_host: Number of ranks on each, which reach each other without that limit.

    Attributes:
        hosts: How many.
        ranks_per_host: Number of ranks on each.
        name: What the names of its namespaces begin with; no other cluster on the machine has it.

    Raises:
        ClusterError: If that cannot be: not root, no ``ip`` or ``tc``, or no such rate.
    """

    def __init__(self, hosts: int, rate: str = UNLIMITED, ranks_per_host: int = 1) -> None:
        if not 1 <= hosts <= network.MOST_HOSTS:
            raise ClusterError(f"hosts={hosts} is not allowed: there can be 1 to {network.MOST_HOSTS} hosts")
        if ranks_per_host < 1:
            raise ClusterError(f"ranks_per_host={ranks_per_host} is not allowed: a host has at least 1 rank")
        bits_per_second(rate)
        network.require()
        self.hosts = hosts
        self.ranks_per_host = ranks_per_host
        self._rate = rate
        self.name = network.new_prefix()

    def __enter__(self) -> Cluster:
        network.remove_leftovers()
        try:
            network.make(self.name, self.hosts)
            network.limit(self.name, self.hosts, self._rate)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hosts, and end what still runs on them; a second Ctrl-C does not stop it."""
        with _undisturbed():
            network.remove(self.name)

    @property
    def rate(self) -> str:
        """The bandwidth of each host, both ways; it can be changed while programs run."""
        return self._rate

    @rate.setter
    def rate(self, rate: str) -> None:
        network.limit(self.name, self.hosts, rate)
        self._rate = rate

    def address(self, number: int) -> str:
        """Return the address of a host, counted from 1."""
        return network.address(number)

    def traffic(self) -> list[Traffic]:
        """Return the bytes that each host has sent and received so far."""
        return network.traffic(self.name, self.hosts)

    def run(
        self, number: int, command: Sequence[str], environment: Mapping[str, str] | None = None, timeout: float = 60
    ) -> Finished:
        """Run a program on one host, counted from 1."""
        return follow([self._start(number, command, environment or {})], timeout, lambda: None)[0]

    def launch(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        timeout: float = 600,
        watch: Callable[[], None] = lambda: None,
        horovod: bool = True,
    ) -> list[Finished]:
        """Run a program of Horovod or `torch.distributed` on all hosts, with Gloo; the first rank that fails ends all.

        Args:
            command: The program, the same for each rank.
            environment: Added to that of this process.
            timeout: Seconds after which a job that hangs is ended.
            watch: Called again and again while the job runs.
            horovod: Whether ranks are told what horovodrun would tell them; otherwise what torchrun would.

        Returns:
            How each rank ended, in their order.

        Raises:
            ClusterError: If Horovod's rendezvous server does not start.
        """
        each = self.ranks_per_host
        with self._rendezvous() if horovod else nullcontext() as port:
            ranks: list[Process] = []
            try:
                for rank in range(self.hosts * each):
                    told = self._torch(rank) if port is None else self._horovod(rank, port)
                    ranks.append(self._start(1 + rank // each, command, {**(environment or {}), **told}))
                return follow(ranks, timeout, watch)
            finally:
                end(ranks)

    @contextmanager
    def _rendezvous(self) -> Iterator[str]:
        """Serve Horovod's ranks, and give the port."""
        slots = ",".join(f"h{number}:{self.ranks_per_host}" for number in range(1, self.hosts + 1))
        server = self._start(1, [sys.executable, "-m", "hvd_compress.tools.cluster.rendezvous", slots], {})
        try:
            yield _port(server)
        finally:
            end([server])
            server.finished()

    def _start(self, number: int, command: Sequence[str], environment: Mapping[str, str]) -> Process:
        command = network.command_on(self.name, number, command)
        return Process(f"h{number}", command, {**os.environ, **environment})

    def _torch(self, rank: int) -> dict[str, str]:
        """Return what torchrun would tell a rank; the ports of the first host are all free."""
        sizes = {"WORLD_SIZE": self.hosts * self.ranks_per_host, "LOCAL_WORLD_SIZE": self.ranks_per_host}
        own = {"RANK": rank, "LOCAL_RANK": rank % self.ranks_per_host}
        named = {"MASTER_ADDR": self.address(1), "MASTER_PORT": _MASTER_PORT, "GLOO_SOCKET_IFNAME": "eth0"}
        return {name: str(value) for name, value in {**own, **sizes, **named}.items()}

    def _horovod(self, rank: int, port: str) -> dict[str, str]:
        """Return what horovodrun would tell a rank."""
        cross, local = divmod(rank, self.ranks_per_host)
        own = {"HOSTNAME": f"h{1 + cross}", "RANK": rank, "LOCAL_RANK": local, "CROSS_RANK": cross}
        sizes = {"SIZE": self.hosts * self.ranks_per_host, "LOCAL_SIZE": self.ranks_per_host, "CROSS_SIZE": self.hosts}
        gloo = {"RENDEZVOUS_ADDR": self.address(1), "RENDEZVOUS_PORT": port, "IFACE": "eth0"}
        named = {**own, **sizes, "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo"}
        named |= {f"GLOO_{name}": value for name, value in gloo.items()}
        return {f"HOROVOD_{name}": str(value) for name, value in named.items()}


def _port(server: Process) -> str:
    """Wait for the port that the server prints."""
    deadline = time.monotonic() + _PATIENCE
    while server.code is None and time.monotonic() < deadline:
        if (lines := server.output().split()) and lines[-1].isdigit():
            return lines[-1]
        time.sleep(0.05)
    raise ClusterError(
        f"Horovod's rendezvous server did not start; hvd-compress doctor tells what is missing. It printed:\n"
        f"{server.output().strip()}"
    )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C; only the main thread may, and only it would be hit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
