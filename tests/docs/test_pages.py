"""The pages of the API."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path

import pytest
from docs.documents import ROOT

MODULES = [""] + [
    f".{name}"
    for name in ("torch", "distributed", "tensorflow", "keras", "mpi", "lab", "pipeline.torch", "pipeline.tensorflow")
]


@pytest.mark.long
def test_each_public_name_has_its_place(tmp_path: Path) -> None:
    found = subprocess.run(["make", "docs", f"PAGES={tmp_path}"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    for module in MODULES:
        name = f"hvd_compress{module}"
        page = (tmp_path / f"{name.replace('.', '/')}.html").read_text()
        for public in importlib.import_module(name).__all__:
            assert f'id="{public}"' in page, f"{name}.{public}"
