"""The facts about this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from hvd_compress._version import __version__
from hvd_compress.tools.doctor import frames
from hvd_compress.tools.doctor.probe import MARK

FRAMEWORKS = {"torch": "PyTorch", "tensorflow": "TensorFlow"}

TITLES = FRAMEWORKS | {"ddp": "DistributedDataParallel"}
"""Names of what can work here, with Horovod or without it."""

_PATIENCE = 600
"""Seconds for the imports of a framework and its adapter: disks are cold, and kernels may be compiled."""

LATE = "did not answer within"
"""Begins the error of a probe that was ended."""


class Framework(NamedTuple):
    """A framework, and Horovod's side of it."""

    name: str  # The name of the module
    version: str | None = None  # None if it is not installed, "" if it could not be asked
    against: str | None = None  # The version that Horovod was built against; None if it was built without
    stage: str = "done"  # The last stage of the probe: ``"framework"``, ``"horovod"``, ``"adapter"`` or ``"done"``
    error: str = ""  # Why it went no farther
    keras: str | None = None  # The version of TensorFlow's Keras
    built: Sequence[str] = ()  # Horovod's parts: ``"gloo"``, ``"mpi"``, ``"nccl"``, ``"cuda"``, ``"rocm"``
    gpus: int = 0  # GPUs that the framework sees
    backends: Sequence[str] = ()  # Those of torch.distributed
    unknown: Sequence[str] = ()  # Names that the adapter reads in Horovod's frames and does not find

    @property
    def title(self) -> str:
        return TITLES[self.name]


class Facts(NamedTuple):
    """The facts about this machine."""

    package: str
    python: str
    numpy: str
    horovod: str | None  # None if it is not installed
    horovodrun: str | None  # Its path; None if it is not found
    on_path: bool  # Whether the shell finds it, too
    launches: str | None  # The Python that horovodrun is of, if that is not this one
    mpirun: str | None  # Its version, as ``"Open MPI 5.0.11"``; None if there is none
    mpi4py: str | None  # None if it is not installed
    library: str | None  # The MPI library that mpi4py uses; an error begins with ``"!"``
    frameworks: Sequence[Framework]  # One entry for each of `FRAMEWORKS`


def search_path() -> str:
    """Return PATH, and after it the folder of this Python: an environment that is not activated works, too."""
    return os.pathsep.join(filter(None, (os.environ.get("PATH"), str(Path(sys.executable).parent))))


def environment() -> dict[str, str]:
    """Return the variables for a Python that imports this very package, and nothing from the current folder."""
    package = str(Path(__file__).resolve().parents[3])
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), package]
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}


def collect() -> Facts:
    """Look at this machine; takes as long as the frameworks' imports."""
    with ThreadPoolExecutor(len(FRAMEWORKS) + 1) as pool:
        mpi4py, *frameworks = pool.map(look, ("mpi4py", *FRAMEWORKS))
    horovodrun = shutil.which("horovodrun", path=search_path())
    return Facts(
        package=__version__,
        python=platform.python_version(),
        numpy=metadata.version("numpy"),
        horovod=_version("horovod"),
        horovodrun=horovodrun,
        on_path=shutil.which("horovodrun") is not None,
        launches=other_python(Path(horovodrun)) if horovodrun else None,
        mpirun=_mpirun(),
        mpi4py=mpi4py.get("version"),
        library=f"!{mpi4py['error']}" if mpi4py.get("error") else mpi4py.get("library"),
        frameworks=[_framework(name, found) for name, found in zip(FRAMEWORKS, frameworks, strict=True)],
    )


def look(name: str) -> dict[str, Any]:
    """Probe a framework in a process of its own; return nothing if it is not installed."""
    if importlib.util.find_spec(name) is None:
        return {}
    command = [sys.executable, "-m", "hvd_compress.tools.doctor.probe", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, env=environment())
        output, end = done.stdout, f"ended with status {done.returncode}: {_last(done.stderr)}"
    except subprocess.TimeoutExpired as late:
        output, end = (late.stdout or b"").decode(), f"{LATE} {_PATIENCE} s"
    return read(output, end)


def read(output: str, end: str) -> dict[str, Any]:
    """Put together what a probe printed; `end` is its error if it died without a word."""
    found: dict[str, Any] = {"version": ""}
    for line in output.splitlines():
        if line.startswith(MARK):
            found |= json.loads(line.removeprefix(MARK))
    if found.get("stage") != "done":
        found.setdefault("error", end)
    return found


def other_python(script: Path) -> str | None:
    """Return the Python that a script is of, if it is not in the folder of this one."""
    with script.open("rb") as file:
        first = file.readline().decode(errors="replace").strip()
    if not first.startswith("#!/") or "python" not in Path(first).name:
        return None
    python = Path(first.removeprefix("#!").split()[0])
    # Not the resolved interpreters: those of two virtual environments may be one and the same.
    same = python.name == "env" or python.parent.resolve() == Path(sys.executable).parent.resolve()
    return None if same else str(python)


def _framework(name: str, found: dict[str, Any]) -> Framework:
    if not found:
        return Framework(name)
    found["version"] = found["version"] or _version(name) or ""
    folder = frames.horovod_folder()
    if folder is None:
        return Framework(name, **found)
    try:
        against = json.loads((folder / "metadata.json").read_text())
    except (OSError, ValueError):
        against = {}
    against = against.get("pytorch" if name == "torch" else name)
    return Framework(name, against=against, unknown=frames.unknown(name, folder), **found)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _mpirun() -> str | None:
    program = shutil.which("mpirun", path=search_path())
    if program is None:
        return None
    try:
        text = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"of unknown version ({error})"
    return mpi_name(text)


def mpi_name(text: str) -> str:
    """Return ``"Open MPI 5.0.11"`` of what ``mpirun --version`` prints; other makes by their first line."""
    match = re.search(r"\(Open MPI\) (\S+)", text)
    return f"Open MPI {match[1]}" if match else (text.strip().splitlines() or ["of unknown version"])[0]


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["it printed nothing"])[-1]
