"""Imports go one way, and `import hvd_compress` needs no framework."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import hvd_compress

ROOT = Path(hvd_compress.__file__).parent
FRAMEWORKS = ("torch", "tensorflow", "horovod", "keras", "mpi4py")

FLOORS = [
    ["_version", "errors", "lab"],
    ["ops"],
    ["core"],
    ["methods", "transport", "checkpoint"],
    ["engine", "local"],
    ["torch", "tensorflow", "mpi", "pipeline"],
    ["distributed", "keras"],
    ["tools"],
    ["__main__"],
]
"""The rooms of the house, from the bottom up: each imports from rooms below it only. The package itself is on top."""


@functools.cache
def modules() -> dict[str, Path]:
    """All modules of the package, by their name within it."""
    found = {}
    for path in ROOT.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        found[name] = path
    return found


@functools.cache
def imported(path: Path) -> set[str]:
    """What a file imports, at any depth of the code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def floor(module: str) -> int:
    """The floor of a module's room."""
    room = module.partition(".")[0]
    (number,) = (number for number, rooms in enumerate(FLOORS) if room in rooms)
    return number


def neighbours(module: str) -> set[str]:
    """The modules of the package that a module imports."""
    inner = {name.removeprefix("hvd_compress.") for name in imported(modules()[module]) if "hvd_compress." in name}
    return inner & modules().keys() - {""}


def test_the_house_stays_small() -> None:
    assert len(FLOORS) <= 9 and sum(map(len, FLOORS)) <= 18


def test_imports_go_downward() -> None:
    for module in sorted(set(modules()) - {""}):
        for other in neighbours(module):
            same = module.partition(".")[0] == other.partition(".")[0]
            assert same or floor(other) < floor(module), f"{module} imports {other}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    """A folder that imports its own modules is none."""
    graph = {
        module: {other for other in neighbours(module) if not module.startswith(f"{other}.") and module != other}
        for module in modules()
    }
    tuple(graphlib.TopologicalSorter(graph).static_order())  # a CycleError names the circle


TORCH, KERAS = {"torch", "horovod"}, {"tensorflow", "horovod"}
KNOWN = {
    "ops.torch": {"torch"},
    "ops.torch_cuda": {"torch"},
    "ops.torch_devices": {"torch"},
    "ops.kernels.cuda": {"torch"},
    "transport.groups": {"horovod"},
    "torch": TORCH,
    "distributed": {"torch"},
    "tensorflow": KERAS,
    "keras": KERAS,
    "mpi": {"mpi4py"},
    "pipeline.torch": {*TORCH, "mpi4py"},
    "pipeline.tensorflow": {"tensorflow"},
    "tools.ranks.process": {"torch"},  # if the rank has a GPU
    # Programs of their own, which other modules start and do not import.
    "tools.bench.horovodrun": {"horovod"},
    "tools.cluster.rendezvous": {"horovod"},
    "tools.bench.distributed.torch_worker": TORCH,
    "tools.bench.distributed.torch_models": {"torch"},
    "tools.bench.distributed.ddp_worker": {"torch"},
    "tools.bench.distributed.fsdp_worker": {"torch"},
    "tools.bench.distributed.keras_worker": KERAS,
    "tools.compare.torch_worker": TORCH,
    "tools.compare.torch_model": {"torch"},
    "tools.compare.ddp_worker": {"torch"},
    "tools.compare.keras_worker": KERAS,
    "tools.doctor.trial": TORCH | KERAS,
    "tools.ranks.torch": TORCH,
    "tools.ranks.keras": KERAS,
    "tools.ranks.group": TORCH,
    # Loaded only where they are asked for.
    "tools.advise.rates": {"torch"},
    "tools.advise.command": {"torch"},
    "tools.advise.here": {"torch"},
    "tools.advise.models": {"torch"},
    "tools.compare.tasks.torch_tasks": {"torch"},
    "tools.compare.tasks.torch_lm": {"torch"},
    "tools.compare.tasks.torch_transformer": {"torch"},
    "tools.compare.tasks.keras_tasks": {"tensorflow"},
}
"""The frameworks that a module, or those of a folder, may import; all others may import none."""


def test_only_some_know_a_framework() -> None:
    for module, path in modules().items():
        entry = next((entry for entry in KNOWN if module == entry or module.startswith(entry + ".")), "")
        tops = {name.partition(".")[0] for name in imported(path)}
        assert tops & set(FRAMEWORKS) <= KNOWN.get(entry, set()), module


def test_adapters_know_no_method() -> None:
    """The maths of a method stands in its module alone: adapters see methods through their interface."""
    for module, path in modules().items():
        if module.split(".")[0] in ("torch", "distributed", "tensorflow", "keras", "mpi"):
            known = {name for name in imported(path) if name.startswith("hvd_compress.methods.")}
            assert all(name.startswith("hvd_compress.methods.wrappers") for name in known), module


LOADS = """
import sys
import hvd_compress as hc, hvd_compress.pipeline, hvd_compress.tools.cli
def loaded(*names): return sorted(set(names) & set(sys.modules))
hc.methods(), hc.LocalWorld("topk:ratio=0.5", 2).step([[1.0, 2.0]] * 2)
frameworks = ("torch", "tensorflow", "horovod", "keras", "mpi4py")
assert not loaded(*frameworks, "rich", "typer"), loaded(*frameworks, "rich", "typer")
import hvd_compress.distributed, hvd_compress.torch.reducer
assert loaded(*frameworks) == ["torch"], loaded(*frameworks)
"""

MISSING = """
import importlib, sys
sys.modules |= dict.fromkeys(("torch", "tensorflow", "mpi4py"))
import hvd_compress
ADAPTERS = {
    "torch": "torch", "distributed": "torch", "pipeline.torch": "torch",
    "tensorflow": "tensorflow", "keras": "tensorflow", "pipeline.tensorflow": "tensorflow", "mpi": "mpi",
}
for adapter, extra in ADAPTERS.items():
    try:
        importlib.import_module(f"hvd_compress.{adapter}")
        raise SystemExit(f"{adapter} needs no {extra}")
    except hvd_compress.CompressionError as error:
        assert f"pip install '.[{extra}]'" in str(error), (adapter, str(error))
"""

WITHOUT_HOROVOD = """
import sys
sys.modules["horovod"] = None
import hvd_compress
try:
    from hvd_compress.torch import Compression
except hvd_compress.CompressionError as error:
    assert "hvd_compress.distributed" in str(error) and "doctor" in str(error) and "pip" not in str(error), str(error)
"""


def runs(code: str) -> None:
    """Run code in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_needs_no_framework_loads_none() -> None:
    """Nor does the engine of PyTorch load Horovod, nor the package what only its command needs."""
    runs(LOADS)


def test_a_missing_framework_is_named_with_its_cure() -> None:
    runs(MISSING)


@pytest.mark.slow
def test_who_has_no_horovod_is_told_what_needs_none() -> None:
    runs(WITHOUT_HOROVOD)


def test_public_names() -> None:
    names = ["CompressionError", "LocalWorld", "__version__", "methods", "node_process_sets", "parse"]
    assert sorted(hvd_compress.__all__) == names
    assert all(hasattr(hvd_compress, name) for name in names)
