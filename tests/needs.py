"""What some tests need of the machine, as ``pytest.mark.needs`` names it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Need(NamedTuple):
    """A program, right or data set that a machine may lack.

    Attributes:
        met: Whether this machine has it.
        name: As messages call it.
        cure: How to get it.
    """

    met: Callable[[], bool]
    name: str
    cure: str


def emulates_hosts() -> bool:
    """Return whether this machine lets us make emulated hosts."""
    return os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc", "unshare")))


def makes_namespaces() -> bool:
    """Return whether this machine lets any user make emulated hosts, in a user namespace."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if not all(shutil.which(command, path=path) for command in ("ip", "tc", "unshare")):
        return False
    return subprocess.run(["unshare", "--user", "--map-root-user", "--net", "--mount", "true"]).returncode == 0


NEEDS = {
    "hosts": Need(emulates_hosts, "emulated hosts", "apt-get install iproute2, and run as root"),
    "namespaces": Need(
        makes_namespaces, "user namespaces", "apt-get install iproute2, on a kernel that lets users make namespaces"
    ),
    "fashion": Need(
        Path("/usr/share/datasets/fashion-mnist").is_dir, "Fashion-MNIST", "apt-get install dataset-fashion-mnist"
    ),
}
