"""Helpers of the steps of `setup_env.py`: paths, checks, logged commands, locks."""

from __future__ import annotations

import ast
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
# What a calling shell may have set, and what would lead pip, uv or the build elsewhere than to the environment.
UNWANTED = re.compile(
    r"PYTHON(HOME|PATH)|VIRTUAL_ENV|PIP_(USER|TARGET|PREFIX|ROOT)|UV_(PYTHON|SYSTEM_PYTHON|TARGET|PREFIX)"
    r"|MAKE.*|MFLAGS|(HOROVOD|OMPI|OPAL)_.*"
)
CHECK_PIP = "check the network and pip's configuration"
# Options of pip's configuration and the variables that give them to uv, which does not read it.
UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "proxy": "ALL_PROXY",
}
PRCTL = ctypes.CDLL(None).prctl


class SetupError(Exception):
    """Error with its cure, in one line."""


class Paths(NamedTuple):
    """Paths: `root` is the checkout, `cache` is shared by all checkouts of the user.

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
    def uv(self) -> Path:
        """The environment's installer."""
        return self.venv / "bin" / "uv"

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
        """Return the pinned requirements from the registry."""
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
    PRCTL(pr_set_pdeathsig, signal.SIGKILL)


def run(paths: Paths, *command: str | Path, **extra: str) -> tuple[bool, str]:
    """Runs a command into the log.

    Args:
        paths: Where everything lies.
        command: The program and its arguments.
        extra: Variables to add to its environment.

    Returns:
        Whether it succeeded, and what it printed.
    """
    words, lines = [str(word) for word in command], []
    with paths.log.open("a", buffering=1, encoding="utf-8") as log:
        print("$", shlex.join(words), file=log)
        with subprocess.Popen(
            words,
            cwd=paths.root,
            env={**environment(paths, os.environ), **extra},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            preexec_fn=die_with_parent,
        ) as process:
            for line in process.stdout or ():
                log.write(line)
                lines.append(line)
    return process.returncode == 0, "".join(lines)


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


def pip_configuration(listed: str) -> dict[str, str]:
    """The options that `pip config list` prints and `pip install` takes: the environment's come last and count."""
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for name, value in re.findall(rf"^{section}\.([\w-]+)=(.+)$", listed, re.MULTILINE):
            found[name] = str(ast.literal_eval(value))
    return found


def uv_variables(options: Mapping[str, str]) -> dict[str, str]:
    """The variables that have uv look where pip looks, take the best of all, and compile it, as pip does."""
    given = {variable: options[name].split() for name, variable in UV_VARIABLES.items() if name in options}
    return {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_COMPILE_BYTECODE": "1",  # as pip does: not at every start, where PYTHONDONTWRITEBYTECODE is set
        **{variable: ("," if variable == "UV_FIND_LINKS" else " ").join(values) for variable, values in given.items()},
    }


def uv_problem(output: str) -> str:
    """Says in a few words why uv failed, with the name of the package."""
    if missing := re.search(r"(\S+) was not found in the|there is no version of (\S+)", output):
        return f"{missing[1] or missing[2]} is not to be had: {CHECK_PIP}"
    reasons = re.findall(r"^\s*(?:error|cause|Caused by): (.*\S)", output, re.MULTILINE) or [last_line(output)]
    return f"uv stopped ({': '.join(dict.fromkeys((reasons[0], reasons[-1])))}): {CHECK_PIP}"


def uv(paths: Paths, what: str, *arguments: str | Path) -> int:
    """Runs `uv pip install` with the user's configuration of pip; `what` begins the message of a failure.

    Returns:
        How many packages it has installed.
    """
    # Not by `run`: addresses may hold passwords, which are nothing for a log.
    command = [str(paths.python), "-m", "pip", "config", "list"]
    listed = subprocess.run(command, env=environment(paths, os.environ), capture_output=True, text=True, check=False)
    options = pip_configuration(listed.stdout)
    variables = {name: value for name, value in uv_variables(options).items() if name not in os.environ}
    no_index = ["--no-index"] if options.get("no-index", "0").lower() in ("1", "true", "yes", "on") else []
    done, output = run(paths, paths.uv, "pip", "install", "--python", paths.python, *no_index, *arguments, **variables)
    if not done:
        raise SetupError(f"{what}: {uv_problem(output)}. Log: {paths.log}")
    return len(re.findall(r"^ \+ ", output, re.MULTILINE))
