"""A new method is one file: that of the documents, known by all that lists methods."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs.documents import ROOT, blocks
from typer.testing import CliRunner

import hvd_compress as hc
from hvd_compress.engine.api import Catalogue
from hvd_compress.errors import SpecError
from hvd_compress.methods import REGISTRY, register
from hvd_compress.tools import cli
from methods_page import catalogue
from methods_page.vnmse import default_specs

CODE = next(block.text for block in blocks("python") if block.document.name == "adding-a-method.md")


@pytest.fixture
def cyclic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the file, which is imported; afterwards all is as it was."""
    (tmp_path / "cyclic.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(REGISTRY)
    importlib.import_module("cyclic")
    yield tmp_path
    del sys.modules["cyclic"]
    REGISTRY.clear()
    REGISTRY.update(before)


def laws(folder: Path) -> str:
    """Run all laws for the method, in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-k",
        "cyclic",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
    ]
    environment = os.environ | {"HVD_COMPRESS_METHODS": "cyclic", "PYTHONPATH": f"{folder}:{ROOT}"}
    command.append("tests/methods/test_laws.py")
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True).stdout


def test_spec_strings_and_constructors_know_it(cyclic: Path) -> None:
    method = hc.parse("cyclic:period=4")
    assert method == hc.parse(str(method)) and str(method) == "cyclic:period=4"
    compression: Catalogue[str] = Catalogue(lambda method, _: str(method))
    assert compression.cyclic(period=4, start=2) == "cyclic:period=4,start=2"
    assert "every n-th coordinate" in (compression.cyclic.__doc__ or "") and "cyclic" in dir(compression)


def test_documents_and_the_command_know_it(cyclic: Path) -> None:
    assert [info.name for info in hc.methods()] == list(REGISTRY)
    assert list(REGISTRY).index("cyclic") < list(REGISTRY).index("int8"), "sparse methods stand together"
    assert "cyclic" in default_specs()
    assert "| `cyclic(period=8)` | allreduce | Send every n-th coordinate, " in catalogue.constructors([])
    assert "\n### cyclic\n" in catalogue.catalogue()
    printed = CliRunner().invoke(cli.complete().app, ["methods", "cyclic"])
    assert printed.exit_code == 0 and "every n-th coordinate" in printed.output


@pytest.mark.slow
def test_the_laws_are_run_on_it(cyclic: Path) -> None:
    """And one that breaks them is caught."""
    said = laws(cyclic)
    assert " passed" in said and "failed" not in said and "error" not in said, said
    (cyclic / "cyclic.py").write_text(CODE.replace("ops.put(x, indices, 0.0)", "ops.put(x, indices, 0.1)"))
    said = laws(cyclic)
    assert "test_residuals_telescope[cyclic:period=4]" in said and " failed" in said, said


def test_nothing_of_it_is_left() -> None:
    assert "cyclic" not in REGISTRY
    with pytest.raises(SpecError, match="unknown method 'cyclic'"):
        hc.parse("cyclic")


def test_a_name_is_taken_once() -> None:
    with pytest.raises(SpecError, match=r"the name 'topk' is taken by hvd_compress.methods.topk.TopK"):
        register(type("Other", (REGISTRY["topk"],), {"__dataclass_params__": True}))
    with pytest.raises(SpecError, match="put @register above @dataclass"):
        register(type("Bare", (REGISTRY["topk"],), {"name": "bare"}))
    assert REGISTRY["topk"].__name__ == "TopK"
