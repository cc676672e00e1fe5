#!/usr/bin/env python3.11
"""Makes `.venv` in this checkout: all that running the demo and the examples need.

With an argument it makes more: with `dev`, `.venv` with all that developing and testing need; with `keras3`,
`.venv-keras3`, in which the tests of `hvd_compress.keras` run on Keras 3; with `cuda`, `.venv-cuda`, with PyTorch for
GPUs and a Horovod that exchanges by NCCL.

The steps, each of which is skipped while nothing that it depends on has changed:

1. *venv*: a virtual environment of Python 3.11, the newest that TensorFlow 2.15 knows. A hook puts its `bin`
   first on PATH in every Python of it, because `horovodrun --mpi` looks for `mpirun` there: activating the
   environment is not needed. *uv* installs uv in it.
2. *frameworks*: what Horovod is built against and by. Packages are named by the groups in `pyproject.toml` and pinned
   by `requirements.lock`, or that of the environment; uv installs them from where the user has configured pip to look.
3. *horovod*: built once and kept in `${XDG_CACHE_HOME:-~/.cache}/hvd_compress/`, see `horovod_wheel.py`.
4. Beside that *packages*, all others; *development*, if it is asked for; *package*, this package itself, editable; and
   *kernels*, which compiles them for CPUs.

What is done is noted in `setup.json` in it, one entry a step, removed before the step begins: a run that was
killed is completed by the next, and a run that has nothing to do ends at once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from horovod_wheel import horovod_key, install_horovod, installed, require_tools, shelf
from setup_shell import CUDA, KERAS3, PYTHON, Paths, SetupError, digest, locked, pip, require_space, run, say, uv

VENV_GIB = 8
DEVELOPMENT = "dev"
PATH_HOOK = (
    "import os, sys; b = os.path.join(sys.prefix, 'bin'); p = os.environ.get('PATH', os.defpath); "
    "os.environ['PATH'] = p if p.split(os.pathsep)[0] == b else b + os.pathsep + p\n"
)


class Step(NamedTuple):
    """A step; `key` hashes what it depends on, which an earlier step may still change, `run` says what it has done."""

    name: str
    key: Callable[[Paths], str]
    run: Callable[[Paths], str]


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


def make_venv(paths: Paths) -> str:
    """Makes an environment with pip alone, in the place of any older one."""
    say(f"Creating {paths.venv.name} ...")
    shutil.rmtree(paths.venv, ignore_errors=True)
    # Not sys.executable: that may be the python of the very environment that was just removed.
    base = str(getattr(sys, "_base_executable", sys.executable))
    done, _ = run(paths, base, "-m", "venv", paths.venv)
    if not done:
        raise SetupError(f"{paths.venv.name} cannot be made: apt-get install python3-venv may help. Log: {paths.log}")
    (paths.site / "venv_bin_on_path.pth").write_text(PATH_HOOK)
    return f"Created {paths.venv.name}"


def uv_key(paths: Paths) -> str:
    """An environment that was made by pip alone gets uv, too; later versions come with the frameworks."""
    return digest(paths.uv) if paths.uv.exists() else ""


def install_uv(paths: Paths) -> str:
    """Installs the installer, by the one that comes with Python."""
    pip(paths, "Installing uv", "install", "-c", paths.pins, "uv")
    return "Installed uv"


def packages_key(paths: Paths) -> str:
    """Hashes the pins, and the groups of what is pinned."""
    return digest(paths.pins.read_bytes(), (paths.root / "pyproject.toml").read_bytes())


def remove_half_installed(paths: Paths) -> None:
    """Makes uv see what a killed pip or uv left unfinished: INSTALLER is written when all files are there."""
    for info in paths.site.glob("*.dist-info"):
        if not (info / "INSTALLER").exists():
            shutil.rmtree(info)
    for renamed in paths.site.glob("~*"):
        shutil.rmtree(renamed, ignore_errors=True)


def install_group(group: str, paths: Paths) -> str:
    """Installs what a group of `pyproject.toml` names; what is there already in the right version stays."""
    remove_half_installed(paths)
    if not installed(paths, "numpy"):
        require_space(paths.venv, VENV_GIB)
        say("Installing the frameworks ...")
    name = f"{group}{paths.suffix}"
    count = uv(paths, f"Installing {paths.pins.name}", "-c", paths.pins, "--group", name)
    return f"Installed {count} packages (group {name})"


def package_key(paths: Paths) -> str:
    """Hashes what the installed metadata is made of."""
    sources = ("pyproject.toml", "hvd_compress/_version.py")
    return digest(*((paths.root / name).read_bytes() for name in sources))


def install_package(paths: Paths) -> str:
    """Installs the package in place, so that an edited file is the installed file."""
    uv(paths, "Installing hvd_compress", "--no-deps", "--no-build-isolation", "-e", paths.root)
    return "Installed hvd_compress"


def kernels_key(paths: Paths) -> str:
    """Hashes the compiler's version; kernels that are edited are compiled when they are first used."""
    return digest(installed(paths, "numba"))


def compile_kernels(paths: Paths) -> str:
    """Compiles the kernels for CPUs; one that is not compiled here is at its first call."""
    done, _ = run(paths, paths.python, "-m", "hvd_compress.ops.kernels.cpu")
    return "Compiled the CPU kernels" if done else "Left the CPU kernels to their first calls"


FIRST = (
    Step("venv", venv_key, make_venv),
    Step("uv", uv_key, install_uv),
    Step("frameworks", packages_key, partial(install_group, "frameworks")),
)
HOROVOD = (Step("horovod", horovod_key, install_horovod),)
BESIDE = (
    Step("packages", packages_key, partial(install_group, "packages")),
    Step("package", package_key, install_package),
    Step("kernels", kernels_key, compile_kernels),
)
DEVELOPMENT_STEP = Step("development", packages_key, partial(install_group, "development"))
STAMP = threading.Lock()
"""Held while the stamp is read and written."""


def read_stamp(paths: Paths) -> dict[str, str]:
    """Return the key of each finished step; nothing if the stamp is missing or damaged."""
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


def take(paths: Paths, steps: Sequence[Step]) -> None:
    """Takes the steps that are not done, and notes each."""
    for step in steps:
        if is_done(paths, step):
            continue
        begin = time.monotonic()
        with STAMP:
            done = read_stamp(paths)
            if done.pop(step.name, None):
                write_stamp(paths, done)
        say(f"{step.run(paths)} in {time.monotonic() - begin:.0f} s.")
        with STAMP:
            write_stamp(paths, {**read_stamp(paths), step.name: step.key(paths)})


def set_up(paths: Paths, development: bool = False) -> None:
    """Takes the steps that are not done: those beside Horovod's build while the build runs."""
    beside = (*BESIDE, DEVELOPMENT_STEP) if development else BESIDE
    if all(is_done(paths, step) for step in (*FIRST, *HOROVOD, *beside)):
        return say(f"{paths.venv.name} is up to date.")
    require_python(tuple(sys.version_info[:3]), importlib.util.find_spec("ensurepip") is not None)
    if not shelf(paths):
        require_tools()  # Now, and not after minutes of downloads.
    paths.cache.mkdir(parents=True, exist_ok=True)
    with locked(paths.lock, "Waiting for another set-up of this checkout ..."):
        paths.log.write_text("")
        take(paths, FIRST)
        with ThreadPoolExecutor(1) as pool:
            others = pool.submit(take, paths, beside)
            take(paths, HOROVOD)
        others.result()
    return say(f"{paths.venv.name} is ready.")


def suffix_of(name: str) -> str:
    """The suffix of an environment, by its name on the command line."""
    suffixes = {suffix.strip("-"): suffix for suffix in ("", KERAS3, CUDA)}
    if name in suffixes:
        return suffixes[name]
    raise SetupError(
        f"there is no environment {name!r}: give none or {DEVELOPMENT}, for .venv, or"
        f" {' or '.join(filter(None, suffixes))}"
    )


def main(name: str = "") -> int:
    """Sets up this checkout; every failure is one line."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        development = name == DEVELOPMENT
        suffix = "" if development else suffix_of(name)
        set_up(Paths(Path(__file__).resolve().parents[1], caches / "hvd_compress", suffix), development)
    except (SetupError, OSError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
