"""The cures of what `rules` finds."""

from __future__ import annotations

import re
from typing import NamedTuple

from hvd_compress.tools.doctor.facts import LATE, Facts, Framework

TESTED = {"horovod": "0.28.1", "torch": "2.13", "tensorflow": "2.15.1", "keras": "2.15", "python": "3.11"}
"""The versions that this package is tested with."""

OPEN_MPI_5 = "--binding-args=--bind-to none --map-by slot"
"""horovodrun's own way to bind ranks to cores is not understood from Open MPI 5 on."""

_OPTIONS = {"torch": "PYTORCH", "tensorflow": "TENSORFLOW"}
_SED = "sed -i"
_PIP = "pip install --no-cache-dir --no-build-isolation"


class Cure(NamedTuple):
    """A cure."""

    text: str
    command: str = ""  # A command for the shell; empty if there is none


def number(version: str | None) -> tuple[int, ...]:
    """Return ``(2, 13)`` of ``"2.13.0+cpu"``."""
    return tuple(int(part) for part in re.findall(r"\d+", version or "")[:2])


def build(facts: Facts) -> Cure:
    """Build Horovod for what is installed."""
    release, again = f"horovod=={TESTED['horovod']}", " --force-reinstall --no-deps" if facts.horovod else ""
    text = "build Horovod after the frameworks that it is for (takes some minutes, needs g++)"
    steps = ["pip install 'cmake<4' 'setuptools<80' wheel"]
    changes = _changes(facts)
    if changes:
        text += "; its sources have to be changed for frameworks as new as these"
        steps += [f"pip download --no-deps --no-build-isolation --no-binary=horovod {release}"]
        release = f"./{release.replace('==', '-')}"
        steps += [f"tar xf {release}.tar.gz", *(change.replace("horovod/", f"{release}/", 1) for change in changes)]
    return Cure(text, " && ".join([*steps, f"{' '.join(_build_options(facts))} {_PIP}{again} {release}"]))


def _build_options(facts: Facts) -> list[str]:
    options = [f"HOROVOD_WITH{'' if f.version is not None else 'OUT'}_{_OPTIONS[f.name]}=1" for f in facts.frameworks]
    options += ["HOROVOD_WITHOUT_MXNET=1", "HOROVOD_WITH_GLOO=1"]
    options += ["HOROVOD_WITH_MPI=1" if facts.mpirun else "HOROVOD_WITHOUT_MPI=1"]
    gpus = any(framework.gpus for framework in facts.frameworks)
    return [*options, "HOROVOD_GPU_OPERATIONS=NCCL"] if gpus else options


def _changes(facts: Facts) -> list[str]:
    """Return the changes that Horovod's sources need: newer frameworks' headers are C++17, its XLA part is outdated."""
    versions = {framework.name: number(framework.version) for framework in facts.frameworks}
    changes = []
    if versions["torch"] >= (2, 1):
        changes += [
            f"{_SED} 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 17/' horovod/{path}CMakeLists.txt"
            for path in ("", "horovod/torch/")
        ]
    if versions["tensorflow"] >= (2, 16):
        changes += [f"{_SED} '/xla_mpi_ops.cc/d' horovod/horovod/tensorflow/CMakeLists.txt"]
    return changes


def of_error(facts: Facts, framework: Framework) -> Cure:
    """Return the cure for an error at an import."""
    error = framework.error.lower()
    if framework.error.startswith(LATE):
        return Cure("run doctor again while the machine is less busy: a first import loads and compiles much")
    if framework.name == "tensorflow" and numpy_too_new(facts, framework):
        return Cure("this TensorFlow needs numpy below 2", "pip install 'numpy<2'")
    if framework.stage == "framework":
        text = f"{framework.title} itself is broken: see what python -c 'import {framework.name}' says, or reinstall it"
        return Cure(text, f"pip install --force-reinstall {framework.name}")
    missing = re.search(r"(lib[\w.+-]+): cannot open shared object", framework.error)
    if missing:
        text = f"the loader does not find {missing[1]}: install it, or put its folder on LD_LIBRARY_PATH; or else "
        return Cure(text + build(facts).text, build(facts).command)
    module = re.search(r"no module named '?([\w-]+)", error)
    if module and module[1] not in ("horovod", "hvd_compress"):
        return Cure("install the missing package", f"pip install {module[1]}")
    if framework.stage == "adapter":
        return Cure("reinstall this package, in its clone", "pip install --force-reinstall --no-deps .")
    return build(facts)


def numpy_too_new(facts: Facts, framework: Framework) -> bool:
    """Return whether this TensorFlow was built before numpy 2."""
    return number(facts.numpy) >= (2,) and (0,) < number(framework.version or framework.against) < (2, 18)
