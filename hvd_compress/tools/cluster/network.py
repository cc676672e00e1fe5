"""The namespaces, devices and bandwidth limits of a cluster, made with ``ip`` and ``tc``.

Each host is a network namespace whose ``eth0`` is plugged into a bridge in a namespace of its own, the switch. Nothing
of it is in the machine's own network, and several clusters do not meet: their switches are not connected, so all may
have the same addresses.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hvd_compress.errors import ClusterError
from hvd_compress.tools.cluster.rates import bits_per_second, bucket

SUBNET = "10.77.0"
MOST_HOSTS = 250

_OURS = "hvd-compress"
_NAMES = re.compile(rf"({_OURS}-(\d+)-(\d+)-\d+)-(h\d+|switch)")
_ETC = Path("/etc/netns")
"""The files that ``ip netns exec`` shows in /etc."""

_serial = itertools.count(1)

_GRACE = 3.0
"""Seconds that programs on a host have to end, when the host is removed."""


class Traffic(NamedTuple):
    """Bytes at the network device of a host."""

    sent: int
    received: int


def new_prefix() -> str:
    """Return a name that no other cluster on this machine has, and that tells which process made it."""
    return f"{_OURS}-{os.getpid()}-{_started(os.getpid())}-{next(_serial)}"


def _started(pid: int) -> int:
    """Return when a process began, in ticks; 0 if there is none with this number."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def require() -> None:
    """Refuse to begin where hosts cannot be made.

    Raises:
        ClusterError: If it is not Linux' root, or a command is missing.
    """
    if os.geteuid() != 0:
        raise ClusterError("emulated hosts need root, as they are network namespaces: run this with sudo")
    for command, package in {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}.items():
        if shutil.which(command) is None:
            raise ClusterError(f"emulated hosts need the command {command!r}: apt-get install {package}")


def run(*command: str) -> str:
    """Run a command of the system.

    It does not get the Ctrl-C of the terminal, so that it is not torn in the middle.

    Raises:
        ClusterError: If it fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, start_new_session=True)
    if done.returncode:
        raise ClusterError(
            f"{' '.join(command)!r} failed: {done.stderr.strip() or done.returncode}; emulated hosts need a kernel with"
            " network namespaces, veth, bridge and tbf, and in a container --privileged"
        )
    return done.stdout


def host(prefix: str, number: int) -> str:
    """Return the namespace of a host, counted from 1."""
    return f"{prefix}-h{number}"


def switch(prefix: str) -> str:
    """Return the namespace with the bridge."""
    return f"{prefix}-switch"


def address(number: int) -> str:
    return f"{SUBNET}.{number}"


def make(prefix: str, hosts: int) -> None:
    """Make the switch and the hosts; the caller removes what there is after an error, too."""
    _make_namespace(switch(prefix))
    run("ip", "-n", switch(prefix), "link", "add", "bridge", "type", "bridge")
    run("ip", "-n", switch(prefix), "link", "set", "bridge", "up")
    for number in range(1, hosts + 1):
        _make_host(prefix, number, hosts)


def _make_namespace(name: str) -> None:
    run("ip", "netns", "add", name)
    run("ip", "-n", name, "link", "set", "lo", "up")
    quiet = [f"net.ipv6.conf.{what}.disable_ipv6=1" for what in ("all", "default")]
    run("ip", "netns", "exec", name, "sysctl", "-qw", "-e", *quiet)


def _make_host(prefix: str, number: int, hosts: int) -> None:
    name = host(prefix, number)
    etc = _ETC / name
    etc.mkdir(parents=True)
    others = "".join(f"{address(i)} h{i}\n" for i in range(1, hosts + 1))
    (etc / "hosts").write_text(f"127.0.0.1 localhost\n{others}")
    (etc / "resolv.conf").write_text("")
    _make_namespace(name)
    port = f"port{number}"
    run("ip", "-n", switch(prefix), "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
    run("ip", "-n", switch(prefix), "link", "set", port, "master", "bridge", "up")
    run("ip", "-n", name, "addr", "add", f"{address(number)}/24", "dev", "eth0")
    run("ip", "-n", name, "link", "set", "eth0", "up")


def limit(prefix: str, hosts: int, rate: str) -> None:
    """Limit what hosts send and what they receive, in place."""
    bits = bits_per_second(rate)
    for number in range(1, hosts + 1):
        for name, device in ((host(prefix, number), "eth0"), (switch(prefix), f"port{number}")):
            if bits is not None:
                run("tc", "-n", name, "qdisc", "replace", "dev", device, "root", "tbf", *bucket(bits))
            elif "tbf" in run("tc", "-n", name, "qdisc", "show", "dev", device):
                run("tc", "-n", name, "qdisc", "del", "dev", device, "root")


def traffic(prefix: str, hosts: int) -> list[Traffic]:
    """Return what has passed the devices of the hosts so far, as the ports of the switch have seen it."""
    links = json.loads(run("ip", "-n", switch(prefix), "-s", "-j", "link"))
    found = {link["ifname"]: link["stats64"] for link in links}
    ports = [found[f"port{number}"] for number in range(1, hosts + 1)]
    return [Traffic(sent=port["rx"]["bytes"], received=port["tx"]["bytes"]) for port in ports]


def command_on(prefix: str, number: int, command: Sequence[str]) -> list[str]:
    """Return what runs a command on a host; its process is that of the command, as each part becomes the next."""
    inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"h{number}", *command]
    return ["ip", "netns", "exec", host(prefix, number), *inside]


def remove(prefix: str) -> None:
    """Remove all that `make` has made under a name, and end what still runs there."""
    names = [found.string for found in _namespaces() if found[1] == prefix]
    _end(names)
    for name in names:
        with contextlib.suppress(ClusterError):
            run("ip", "netns", "del", name)
    for etc in _ETC.glob(f"{prefix}-*"):
        shutil.rmtree(etc, ignore_errors=True)
    with contextlib.suppress(OSError):
        _ETC.rmdir()  # unless something else is in it


def remove_leftovers() -> None:
    """Remove the clusters of processes that are gone."""
    for prefix, pid, started in {found.group(1, 2, 3) for found in _namespaces()}:
        if _started(int(pid)) != int(started):
            remove(prefix)


def _namespaces() -> Iterator[re.Match[str]]:
    """Yield all namespaces of any cluster; the files alone tell it where a namespace was made by half."""
    for folder in (Path("/run/netns"), _ETC):
        for path in sorted(folder.glob(f"{_OURS}-*")):
            if match := _NAMES.fullmatch(path.name):
                yield match


def _end(names: Sequence[str]) -> None:
    """End what runs in namespaces: by SIGTERM, then by SIGKILL."""
    deadline = time.monotonic() + _GRACE
    for kind in (signal.SIGTERM, signal.SIGKILL):
        for pid in _running(names):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, kind)
        while _running(names) and time.monotonic() < deadline:
            time.sleep(0.05)


def _running(names: Sequence[str]) -> list[int]:
    found: list[int] = []
    for name in names:
        with contextlib.suppress(ClusterError):
            found += map(int, run("ip", "netns", "pids", name).split())
    return found
