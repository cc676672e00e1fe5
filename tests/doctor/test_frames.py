"""Whether Horovod calls as the adapters expect: read from the sources of this one, and of some that could be."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import hvd_compress
from hvd_compress.tools.doctor.frames import CALLERS, horovod_folder, unknown


def installed() -> Path:
    folder = horovod_folder()
    assert folder is not None
    return folder


@pytest.mark.parametrize("framework", CALLERS)
def test_this_horovod_is_understood(framework: str) -> None:
    assert unknown(framework, installed()) == ()


CHANGES = [
    ("torch", "def _allreduce_grad_async(self, p)", "def _reduce(self, p)", "_allreduce_grad_async()"),
    (
        "torch",
        "_grouped_allreduce_grad_async(self, ps)",
        "_grouped_allreduce_grad_async(self, these)",
        "ps in _grouped",
    ),
    ("torch", "self._parameter_names", "self._names", "_parameter_names"),
    ("torch", "process_set=global_process_set", "ranks=global_process_set", "process_set in allreduce()"),
    ("torch", "_handle_map", "_handles_of", "_handle_map"),
    ("tensorflow", "def allreduce_grads(grads, vars=None", "def allreduce_grads(grads, variables=None", "vars in all"),
    ("tensorflow", "def grouped_allreduce(", "def allreduce_group(", "grouped_allreduce()"),
    ("tensorflow", "import os\n", "import os\n(\n", "tensorflow/__init__.py (SyntaxError)"),
]


def test_another_horovod_is_not(tmp_path: Path) -> None:
    for framework, old, new, expected in CHANGES:
        texts = {path: (installed() / path).read_text() for path in CALLERS[framework].functions}
        assert any(old in text for text in texts.values())
        for path, text in texts.items():
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_text(text.replace(old, new))
        missing = unknown(framework, tmp_path)
        assert any(what.startswith(expected) for what in missing), missing


def test_a_part_that_is_not_there(tmp_path: Path) -> None:
    shutil.copytree(installed() / "torch", tmp_path / "torch", ignore=shutil.ignore_patterns("*.so"))
    assert unknown("torch", tmp_path) == ()
    assert unknown("tensorflow", tmp_path) == ("tensorflow/__init__.py (FileNotFoundError)",)


@pytest.mark.parametrize("framework", CALLERS)
def test_it_looks_for_what_the_adapters_read(framework: str) -> None:
    """The names stand in the adapter's caller.py as well, which cannot be imported without the framework."""
    where = {"torch": "torch/horovod"}.get(framework, framework)
    nodes = list(ast.walk(ast.parse((Path(hvd_compress.__file__).parent / where / "caller.py").read_text())))
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    used = strings | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    functions = {name: known for file in CALLERS[framework].functions.values() for name, known in file.items()}
    variables = set[str]().union(*functions.values())
    assert variables | CALLERS[framework].names <= used
    found = {name.removeprefix("tf__") for name in strings if "allreduce" in name and name.isidentifier()}
    assert found == functions.keys()
    assert {key for node in nodes for key in _read_in_frames(node)} <= variables


def _read_in_frames(node: ast.AST) -> Iterator[str]:
    """The key, if a node is something like ``frame.f_locals["key"]``."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        if owner in ("f_locals", "variables", "reducing"):
            yield str(node.slice.value)
