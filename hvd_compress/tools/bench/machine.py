"""The machine of a measurement."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from hvd_compress.tools.units import counted

_PACKAGES = ("hvd-compress", "horovod", "torch", "tensorflow", "numpy", "numba")


class Machine(NamedTuple):
    """A machine and its software."""

    cpu: str
    cores: int  # Cores that this process may use
    memory_bytes: int
    system: str
    kernel: str  # The version of the kernel
    python: str
    packages: dict[str, str]  # Versions of the packages that count, of those installed
    # The models of NVIDIA's GPUs
    gpus: list[str] = []  # noqa: RUF012

    @classmethod
    def here(cls) -> Machine:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        system = _first(r'PRETTY_NAME="?([^"\n]*)', "/etc/os-release") or platform.system()
        cpu = _first(r"model name\s*: (.*)", "/proc/cpuinfo") or platform.machine()
        cores = len(os.sched_getaffinity(0))
        gpus = [_first(r"Model:\s*(.*)", str(path)) for path in Path("/proc/driver/nvidia/gpus").glob("*/information")]
        return cls(cpu, cores, memory, system, platform.release(), platform.python_version(), _versions(), gpus)

    def __str__(self) -> str:
        cores = counted(self.cores, "core")
        packages = ", ".join(f"{name} {version}" for name, version in self.packages.items())
        hardware = ", ".join([self.cpu, cores, f"{self.memory_bytes / 2**30:.0f} GiB", *self.gpus])
        return f"{hardware}; {self.system}, Linux {self.kernel}; Python {self.python}, {packages}"


def _first(pattern: str, path: str) -> str:
    """Return the first match in a file; empty if there is none."""
    try:
        match = re.search(pattern, Path(path).read_text())
    except OSError:
        return ""
    return match[1].strip() if match else ""


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
