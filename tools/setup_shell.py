"""What the steps of `setup_env.py` share: where things lie, checks, commands that write to the log, locks."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PYTHON = (3, 11)
KERAS3 = "-keras3"
CUDA = "-cuda"
# What a calling shell may have set, and what would lead pip or the build elsewhere than to the environment.
UNWANTED = re.compile(
    r"PYTHON(HOME|PATH)|VIRTUAL_ENV|PIP_(USER|TARGET|PREFIX|ROOT)|MAKE.*|MFLAGS|(HOROVOD|OMPI|OPAL)_.*"
)
CHECK_PIP = "check the network and pip's configuration"


class SetupError(Exception):
    """What is missing or went wrong and how to cure it, in one line."""


class Paths(NamedTuple):
    """Where everything lies: `root` is the checkout, `cache` is shared by all checkouts of the user.

    `suffix` tells environments of one checkout apart: it ends the names of the folder, of its pins, log and lock.
    """

    root: Path
    cache: Path
    suffix: str = ""

    @property
    def venv(self) -> Path:
        """The virtual environment."""
        return self.root / f".venv{self.suffix}"

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.venv / "bin" / "python"

    @property
    def site(self) -> Path:
        """The environment's installed distributions."""
        return self.venv / "lib" / f"python{PYTHON[0]}.{PYTHON[1]}" / "site-packages"

    @property
    def log(self) -> Path:
        """All output of the commands that the steps run."""
        return self.root / f".venv{self.suffix}.log"

    @property
    def lock(self) -> Path:
        """Held while the environment is set up."""
        return self.root / f".venv{self.suffix}.lock"

    @property
    def pins(self) -> Path:
        """What is installed from the registry, each in one version."""
        return self.root / f"requirements{self.suffix}.lock"


def digest(*parts: object) -> str:
    """Hashes parts into a short key."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def say(text: str) -> None:
    """Prints a line of progress at once, also into a pipe."""
    print(text, flush=True)


def require_space(folder: Path, gib: int) -> None:
    """Refuses to begin what the disk cannot hold."""
    free = shutil.disk_usage(folder).free / 2**30
    if free < gib:
        raise SetupError(f"{folder} needs {gib} GiB of free disk and has {free:.1f}: free some")


@contextlib.contextmanager
def locked(file: Path, waiting: str) -> Iterator[None]:
    """Holds a lock between processes, which ends with the process that holds it, however that ends."""
    with file.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(waiting)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def environment(paths: Paths, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables for a command inside the environment, whatever the calling shell has activated."""
    kept = {name: value for name, value in inherited.items() if not UNWANTED.fullmatch(name)}
    path = f"{paths.venv / 'bin'}{os.pathsep}{inherited.get('PATH', os.defpath)}"
    return {**kept, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def die_with_parent() -> None:
    """Asks the kernel to end this process with its parent: a killed set-up must not leave a pip at work."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def run(paths: Paths, *command: str | Path, **extra: str) -> tuple[bool, str]:
    """Runs a command into the log.

    Args:
        paths: Where everything lies.
        command: The program and its arguments.
        extra: Variables to add to its environment.

    Returns:
        Whether it succeeded, and what it printed.
    """
    words = [str(word) for word in command]
    with paths.log.open("a+", errors="replace") as log:
        print("$", shlex.join(words), file=log, flush=True)
        start = log.tell()
        code = subprocess.run(
            words,
            cwd=paths.root,
            env={**environment(paths, os.environ), **extra},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
            check=False,
        ).returncode
        log.seek(start)
        return code == 0, log.read()


def last_line(output: str) -> str:
    """The last line of an output: of a traceback, the error."""
    return (output.strip().splitlines() or ["no output"])[-1].strip()


def pip_problem(output: str) -> str:
    """Says in a few words why pip failed, with the name of the package."""
    if "DO NOT MATCH THE HASHES" in output:
        return "the sha256 of the download is not that of the release (damaged or forged): pip cache purge"
    missing = re.findall(r"No matching distribution found for (\S+)", output)
    if missing:
        return f"{missing[-1]} is not to be had: {CHECK_PIP}"
    collected = re.findall(r"^\s*(?:Collecting|Downloading) (\S+)", output, re.MULTILINE)
    errors = re.findall(r"^\s*ERROR: (?!Exception:)(.*\S)", output, re.MULTILINE)
    at = f" at {collected[-1]}" if collected else ""
    return f"pip stopped{at} ({errors[0] if errors else last_line(output)}): {CHECK_PIP}"


def pip(paths: Paths, what: str, *arguments: str | Path) -> None:
    """Runs the environment's pip; `what` begins the message of a failure."""
    done, output = run(paths, paths.python, "-m", "pip", *arguments)
    if not done:
        raise SetupError(f"{what}: {pip_problem(output)}. Log: {paths.log}")
