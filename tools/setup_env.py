#!/usr/bin/env python3.11
"""Makes `.venv` in this checkout: all that developing, testing and running the demo need.

With an argument it makes another environment in the same way: with `keras3`, `.venv-keras3` out of
`requirements-keras3.lock`, in which the tests of `hvd_compress.keras` run on Keras 3; with `cuda`, `.venv-cuda` out of
`requirements-cuda.lock`, with PyTorch for GPUs and a Horovod that exchanges by NCCL.

The steps, each of which is skipped while nothing that it depends on has changed:

1. *venv*: a virtual environment of Python 3.11, the newest that TensorFlow 2.15 knows. A hook puts its `bin`
   first on PATH in every Python of it, because `horovodrun --mpi` looks for `mpirun` there: activating the
   environment is not needed.
2. *requirements*: what `requirements.lock` pins, with pip as the user has configured it.
3. *horovod*: built once and kept in `${XDG_CACHE_HOME:-~/.cache}/hvd_compress/`, see `horovod_wheel.py`.
4. *package*: this package itself, editable, without its dependencies.

What is done is noted in `setup.json` in it, one entry a step, removed before the step begins: a run that was
killed is completed by the next, and a run that has nothing to do ends at once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from horovod_wheel import horovod_key, install_horovod, installed, require_tools, shelf
from setup_shell import CUDA, KERAS3, PYTHON, Paths, SetupError, digest, locked, pip, require_space, run, say

VENV_GIB = 8
PATH_HOOK = (
    "import os, sys; b = os.path.join(sys.prefix, 'bin'); p = os.environ.get('PATH', os.defpath); "
    "os.environ['PATH'] = p if p.split(os.pathsep)[0] == b else b + os.pathsep + p\n"
)


class Step(NamedTuple):
    """A step; `key` hashes what it depends on, which an earlier step may still change."""

    name: str
    key: Callable[[Paths], str]
    run: Callable[[Paths], None]


def require_python(version: tuple[int, ...], has_ensurepip: bool) -> None:
    """Refuses an interpreter that the environment cannot be made of."""
    if version[:2] != PYTHON:
        raise SetupError(
            f"Python {PYTHON[0]}.{PYTHON[1]} is needed, this is {version[0]}.{version[1]}: "
            "apt-get install python3.11 python3.11-venv, or name one: make PYTHON=/path/to/python3.11"
        )
    if not has_ensurepip:
        raise SetupError("Python's venv module is incomplete (no ensurepip): apt-get install python3-venv")


def venv_key(paths: Paths) -> str:
    """An environment holds its own path, so a moved checkout needs a new one."""
    return digest(paths.venv, PYTHON, PATH_HOOK) if paths.python.exists() else ""


def make_venv(paths: Paths) -> None:
    """Makes an empty environment, in the place of any older one."""
    say(f"Creating {paths.venv.name} ...")
    shutil.rmtree(paths.venv, ignore_errors=True)
    # Not sys.executable: that may be the python of the very environment that was just removed.
    base = str(getattr(sys, "_base_executable", sys.executable))
    done, _ = run(paths, base, "-m", "venv", paths.venv)
    if not done:
        raise SetupError(f"{paths.venv.name} cannot be made: apt-get install python3-venv may help. Log: {paths.log}")
    (paths.site / "venv_bin_on_path.pth").write_text(PATH_HOOK)


def requirements_key(paths: Paths) -> str:
    """Hashes the pins."""
    return digest(paths.pins.read_bytes())


def remove_half_installed(paths: Paths) -> None:
    """Makes pip see what a killed pip left unfinished: it writes RECORD last."""
    for info in paths.site.glob("*.dist-info"):
        if not (info / "RECORD").exists():
            shutil.rmtree(info)
    for renamed in paths.site.glob("~*"):
        shutil.rmtree(renamed, ignore_errors=True)


def install_requirements(paths: Paths) -> None:
    """Installs the pins; what is there already in the right version stays."""
    remove_half_installed(paths)
    if not installed(paths, "numpy"):
        require_space(paths.venv, VENV_GIB)
    say(f"Installing {paths.pins.name} (a few minutes) ...")
    pip(paths, f"Installing {paths.pins.name}", "install", "-r", paths.pins)


def package_key(paths: Paths) -> str:
    """Hashes what the installed metadata is made of."""
    sources = ("pyproject.toml", "hvd_compress/_version.py")
    return digest(*((paths.root / name).read_bytes() for name in sources))


def install_package(paths: Paths) -> None:
    """Installs the package in place, so that an edited file is the installed file."""
    say("Installing hvd_compress ...")
    options = ("--no-deps", "--no-build-isolation", "-e", paths.root)
    pip(paths, "Installing hvd_compress", "install", *options)


STEPS = (
    Step("venv", venv_key, make_venv),
    Step("requirements", requirements_key, install_requirements),
    Step("horovod", horovod_key, install_horovod),
    Step("package", package_key, install_package),
)


def read_stamp(paths: Paths) -> dict[str, str]:
    """What is done, as a key for each step; nothing if the stamp is missing or damaged."""
    try:
        return dict(json.loads((paths.venv / "setup.json").read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def write_stamp(paths: Paths, done: dict[str, str]) -> None:
    """Notes what is done, in one piece."""
    new = paths.venv / "setup.json.new"
    new.write_text(json.dumps(done, indent=1) + "\n")
    new.replace(paths.venv / "setup.json")


def is_done(paths: Paths, step: Step) -> bool:
    """Tells whether a step has been done with what it depends on now."""
    return read_stamp(paths).get(step.name, "") == step.key(paths) != ""


def take(paths: Paths, step: Step) -> None:
    """Runs a step and notes it."""
    done = read_stamp(paths)
    if done.pop(step.name, None):
        write_stamp(paths, done)
    step.run(paths)
    write_stamp(paths, {**read_stamp(paths), step.name: step.key(paths)})


def set_up(paths: Paths) -> None:
    """Takes the steps that are not done."""
    if all(is_done(paths, step) for step in STEPS):
        return say(f"{paths.venv.name} is up to date.")
    require_python(tuple(sys.version_info[:3]), importlib.util.find_spec("ensurepip") is not None)
    if not shelf(paths):
        require_tools()  # Now, and not after minutes of downloads.
    paths.cache.mkdir(parents=True, exist_ok=True)
    with locked(paths.lock, "Waiting for another set-up of this checkout ..."):
        paths.log.write_text("")
        for step in STEPS:
            if not is_done(paths, step):
                take(paths, step)
    return say(f"{paths.venv.name} is ready.")


def suffix_of(name: str) -> str:
    """The suffix of an environment, by its name on the command line."""
    suffixes = {suffix.strip("-"): suffix for suffix in ("", KERAS3, CUDA)}
    if name in suffixes:
        return suffixes[name]
    raise SetupError(
        f"there is no environment {name!r}: give none, for .venv, or {' or '.join(filter(None, suffixes))}"
    )


def main(name: str = "") -> int:
    """Sets up this checkout; every failure is one line."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        set_up(Paths(Path(__file__).resolve().parents[1], caches / "hvd_compress", suffix_of(name)))
    except (SetupError, OSError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
