"""Imports go one way, and `import hvd_compress` needs no framework."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import hvd_compress

ROOT = Path(hvd_compress.__file__).parent
FRAMEWORKS = ("torch", "tensorflow", "horovod", "keras", "mpi4py")

LAYERS = [
    ["_version", "errors"],
    ["core", "core.bucket", "tools.units"],
    ["tools.tables", "tools.terminal", "tools.drawing", "tools.cluster"],
    ["core.collectives"],
    ["core.nodes", "core.state_tree"],
    ["ops"],
    ["core.totals"],
    ["kernels"],
    ["ops.buffer_pool", "ops.delivery"],
    ["ops.cpu_kernels"],
    ["ops.numpy_compiled", "ops.torch", "ops.tensorflow"],
    ["ops.torch_cuda"],
    ["ops.torch_devices"],
    ["core.lowering"],
    ["group", "direct_calls"],
    ["methods.base"],
    ["core.transport"],
    ["core.lockstep"],
    ["core.rank_threads"],
    ["core.rank_threads"],
    ["methods.sparse", "methods.quantised", "methods.lowrank"],
    ["methods.cast", "methods.topk", "methods.qsgd"],
    ["methods"],
    ["wrappers", "wrappers.error_feedback", "wrappers.measure"],
    ["wrappers.momentum", "wrappers.schedule"],
    ["wrappers.precondition", "wrappers.router"],
    ["spec"],
    ["bucketing", "stats"],
    ["bucket_autotune", "checkpoint", "checkpoint.agreement", "checkpoint.resharding"],
    ["checkpoint.state_dict"],
    ["checkpoint.saves"],
    ["checkpoint.state_files"],
    ["checkpoint.saving"],
    ["core.local_world"],
    ["api", "checkpoint.elastic"],
    ["pipeline.operators", "pipeline.samples", "pipeline.schedule"],
    ["pipeline.exchanging", "pipeline.settings"],
    ["pipeline.streams"],
    ["pipeline.wire", "pipeline.traffic"],
    ["pipeline"],
    ["torch", "tensorflow", "mpi"],
    ["keras", "distributed", "tools.ranks"],
    ["tools.bench"],
    ["tools.methods"],
    ["tools.compare", "tools.plan"],
    ["lab", "tools.compare.report"],
    ["tools.compare.command"],
    ["tools.doctor"],
    ["tools.cli"],
    ["__main__"],
]
"""From the bottom up: a module may import from its own entry and from the rows below. The package itself is on top."""


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


def place(module: str) -> tuple[int, str]:
    """The row and the entry of a module: the longest entry that its name begins with."""
    entries = [(row, entry) for row, names in enumerate(LAYERS) for entry in names]
    fits = [(row, e) for row, e in entries if module == e or module.startswith(e + ".")]
    assert fits, f"{module} has no place in LAYERS"
    return max(fits, key=lambda found: len(found[1]))


def test_imports_go_downward() -> None:
    for module in sorted(set(modules()) - {"", "tools"}):
        row, entry = place(module)
        for name in imported(modules()[module]):
            inner = name.removeprefix("hvd_compress.")
            if name.startswith("hvd_compress.") and inner in modules() and inner != "tools":
                other_row, other_entry = place(inner)
                assert other_row < row or other_entry == entry, f"{module} imports {inner}"


TORCH, KERAS = {"torch", "horovod"}, {"tensorflow", "horovod"}
KNOWN = {
    "ops.torch": {"torch"},
    "ops.torch_cuda": {"torch"},
    "ops.torch_devices": {"torch"},
    "ops.tensorflow": {"tensorflow"},
    "kernels.cuda": {"torch"},
    "group": {"horovod"},
    "torch": TORCH,
    "distributed": {"torch"},
    "tensorflow": KERAS,
    "keras": KERAS,
    "mpi": {"mpi4py"},
    "pipeline.torch": {*TORCH, "mpi4py"},
    "pipeline.tensorflow": {"tensorflow"},
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
    "tools.plan.rates": {"torch"},
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
            assert all(name.startswith("hvd_compress.methods.base") for name in known), module


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
