"""An environment's paths, and commands in it, for `setup_env.py`."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

PYTHON = (3, 11)
# What a calling shell may have set, and what would lead pip, uv or the build elsewhere than to the environment.
UNWANTED = re.compile(
    r"PYTHON(HOME|PATH)|VIRTUAL_ENV|PIP_(USER|TARGET|PREFIX|ROOT)|UV_(PYTHON|SYSTEM_PYTHON|TARGET|PREFIX)"
    r"|MAKE.*|MFLAGS|(HOROVOD|OMPI|OPAL)_.*"
)
# Options of pip's configuration and the variables that give them to uv, which does not read it.
UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "timeout": "UV_HTTP_TIMEOUT",
    "proxy": "ALL_PROXY",
}


class SetupError(Exception):
    """Error with its cure, in one line."""


class Environment(NamedTuple):
    """A virtual environment: `root` is the checkout, `cache` is shared by all checkouts of the user.

    `suffix` tells environments of one checkout apart: it ends the names of the folder, of its pins and its log.
    """

    root: Path
    cache: Path
    suffix: str = ""

    @property
    def venv(self) -> Path:
        """Its folder."""
        return self.root / f".venv{self.suffix}"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.venv / "bin" / "python"

    @property
    def site(self) -> Path:
        """Its installed distributions."""
        return self.venv / "lib" / f"python{PYTHON[0]}.{PYTHON[1]}" / "site-packages"

    @property
    def log(self) -> Path:
        """All output of the commands that make it."""
        return self.root / f".venv{self.suffix}.log"

    @property
    def pins(self) -> Path:
        """Its pinned requirements from the registry."""
        return self.root / f"requirements{self.suffix}.lock"

    def installed(self, name: str) -> list[str]:
        """The version of a distribution in it, with its build label; empty if it is not there."""
        return sorted(info.name for info in self.site.glob(f"{name}-[0-9]*.dist-info"))

    def variables(self) -> dict[str, str]:
        """The variables for a command in it, whatever the calling shell has activated."""
        kept = {name: value for name, value in os.environ.items() if not UNWANTED.fullmatch(name)}
        path = f"{self.venv / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {**kept, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}

    def run(self, what: str, *command: str | Path, **extra: str) -> None:
        """Runs a command into the log, with more variables; `what` is said before.

        Raises:
            SetupError: If it fails, with the last line that it printed.
        """
        print(f"{what} ...", flush=True)
        words, begin = [str(word) for word in command], time.monotonic()
        done = subprocess.run(
            words,
            cwd=self.root,
            env={**self.variables(), **extra},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        with self.log.open("a", encoding="utf-8") as log:
            print("$", shlex.join(words), done.stdout, f"({time.monotonic() - begin:.0f} s)", sep="\n", file=log)
        if done.returncode:
            lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
            telling = [line for line in lines if re.search(r"(?i)error\b.*:|caused by|because", line)][-2:]
            why = " ".join(telling or lines[-1:])
            raise SetupError(f"{what} failed: {why} (all that it printed is in {self.log})")

    def pip(self, what: str, *arguments: str | Path) -> None:
        """Runs its pip."""
        self.run(what, self.python, "-m", "pip", *arguments)

    def uv(self, what: str, *arguments: str | Path) -> None:
        """Runs ``uv pip install`` with the user's configuration of pip."""
        # Not by `run`: addresses may hold passwords, which are nothing for a log.
        command = [str(self.python), "-m", "pip", "config", "list"]
        listed = subprocess.run(command, env=self.variables(), capture_output=True, text=True, check=False).stdout
        options = pip_configuration(listed)
        variables = {name: value for name, value in uv_variables(options).items() if name not in os.environ}
        no_index = ["--no-index"] if options.get("no-index", "0").lower() in ("1", "true", "yes", "on") else []
        uv = self.venv / "bin" / "uv"
        self.run(what, uv, "pip", "install", "--python", self.python, *no_index, *arguments, **variables)


def require_space(folder: Path, gib: int) -> None:
    """Refuses to begin what the disk cannot hold."""
    free = shutil.disk_usage(folder).free / 2**30
    if free < gib:
        raise SetupError(f"{folder} needs {gib} GiB of free disk and has {free:.1f}: free some")


def pip_configuration(listed: str) -> dict[str, str]:
    """The options that `pip config list` prints and `pip install` takes: the environment's come last and count."""
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for name, value in re.findall(rf"^{section}\.([\w-]+)=(.+)$", listed, re.MULTILINE):
            found[name.replace("default-timeout", "timeout")] = str(ast.literal_eval(value))
    return found


def uv_variables(options: Mapping[str, str]) -> dict[str, str]:
    """The variables that have uv look where pip looks, take the best of all, and compile it, as pip does."""
    given = {variable: options[name].split() for name, variable in UV_VARIABLES.items() if name in options}
    return {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_COMPILE_BYTECODE": "1",  # as pip does: not at every start, where PYTHONDONTWRITEBYTECODE is set
        **{variable: ("," if variable == "UV_FIND_LINKS" else " ").join(values) for variable, values in given.items()},
    }
