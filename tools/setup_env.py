#!/usr/bin/env python3.11
"""Makes `.venv` in this checkout: all that running the demo and the examples need.

With an argument it makes more: with `dev`, `.venv` with all that developing and testing need; with `keras3`,
`.venv-keras3`, in which the tests of `hvd_compress.keras` run on Keras 3; with `torchtitan`, `.venv-torchtitan`, with
torchtitan and without Horovod; with `cuda`, `.venv-cuda`, with PyTorch for GPUs and a Horovod that exchanges by NCCL.

Packages are named by the groups in `pyproject.toml` and pinned by `requirements.lock`, or that of the environment; uv
installs them from where pip is configured to look. Horovod is built once, by `horovod_wheel.py`. A run that was killed
is completed by the next, and a run that has nothing to do ends at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import horovod_wheel
from setup_shell import PYTHON, Environment, SetupError, require_space

VENV_GIB = 8
SUFFIXES = {"": "", "dev": "", "keras3": "-keras3", "torchtitan": "-torchtitan", "cuda": "-cuda"}
"""Suffixes of environments, by the argument."""

# `horovodrun --mpi` looks for `mpirun` on PATH; so activating the environment is not needed.
PATH_HOOK = (
    "import os, sys; b = os.path.join(sys.prefix, 'bin'); p = os.environ.get('PATH', os.defpath); "
    "os.environ['PATH'] = p if p.split(os.pathsep)[0] == b else b + os.pathsep + p\n"
)


def key(env: Environment, name: str) -> str:
    """Hashes all that an environment is made of; one that has moved does not work any more."""
    files = [env.pins, *(env.root / one for one in ("pyproject.toml", "hvd_compress/_version.py"))]
    files += [env.root / "tools" / one for one in ("setup_env.py", "setup_shell.py", "horovod_wheel.py")]
    parts = [str(env.venv).encode(), name.encode(), *(file.read_bytes() for file in files)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def make_venv(env: Environment) -> None:
    """Makes an environment with uv alone, unless there is one at this place already."""
    version, ensurepip = tuple(sys.version_info[:2]), importlib.util.find_spec("ensurepip")
    if version != PYTHON or ensurepip is None:
        raise SetupError(
            f"Python {PYTHON[0]}.{PYTHON[1]} with its venv module is needed, this is {version[0]}.{version[1]}:"
            " apt-get install python3.11 python3.11-venv, or name one: make PYTHON=/path/to/python3.11"
        )
    home = env.venv / "made_at"
    if not home.is_file() or home.read_text() != str(env.venv):
        shutil.rmtree(env.venv, ignore_errors=True)
        require_space(env.root, VENV_GIB)
        # Not sys.executable: that may be the python of the very environment that was just removed.
        env.run(f"Creating {env.venv.name}", getattr(sys, "_base_executable", sys.executable), "-m", "venv", env.venv)
        home.write_text(str(env.venv))
    (env.site / "venv_bin_on_path.pth").write_text(PATH_HOOK)
    env.pip("Installing uv", "install", "-c", env.pins, "uv")


def install(env: Environment, *groups: str) -> None:
    """Installs the package itself, editable, and what groups of `pyproject.toml` name; compiles the kernels."""
    for group in groups:
        env.uv(f"Installing packages ({group})", "-c", env.pins, "--group", f"{group}{env.suffix}")
    env.uv("Installing hvd_compress", "--no-deps", "--no-build-isolation", "-e", env.root)
    env.run("Compiling the CPU kernels", env.python, "-m", "hvd_compress.ops.kernels.cpu")


def set_up(env: Environment, name: str) -> None:
    """Makes an environment complete: the rest is installed while Horovod is built."""
    stamp, wanted = env.venv / "setup", key(env, name)
    if stamp.is_file() and stamp.read_text() in (wanted, key(env, "dev")):
        return print(f"{env.venv.name} is up to date.")
    horovod = name != "torchtitan"
    if horovod:
        horovod_wheel.require_tools(env)  # now, and not after minutes of downloads
    env.cache.mkdir(parents=True, exist_ok=True)
    with (env.cache / "lock").open("a") as lock:  # of this user: two builds at a time take twice as long each
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp.unlink(missing_ok=True)
        env.log.write_text("")
        make_venv(env)
        env.uv("Installing packages (frameworks)", "-c", env.pins, "--group", f"frameworks{env.suffix}")
        with ThreadPoolExecutor(1) as pool:
            rest = pool.submit(install, env, "packages", *(["development"] if name == "dev" else []))
            if horovod:
                horovod_wheel.install(env)
        rest.result()
        stamp.write_text(wanted)
    return print(f"{env.venv.name} is ready.")


def main(name: str = "") -> int:
    """Sets up this checkout; every failure is one line."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        if name not in SUFFIXES:
            raise SetupError(f"there is no environment {name!r}: give none, or {', '.join(filter(None, SUFFIXES))}")
        set_up(Environment(Path(__file__).resolve().parents[1], caches / "hvd_compress", SUFFIXES[name]), name)
    except (SetupError, OSError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
