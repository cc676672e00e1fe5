"""The kernels for CUDA, in processes of their own: Triton decides when it is imported whether it interprets.

On a machine with a GPU: ``python -m pytest tests/kernels/cuda/codes.py tests/kernels/cuda/arrays.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs

CASES = Path(__file__).parent / "cuda"


def run(file: str, **variables: str) -> str:
    """Run a file of tests, and give what pytest says in the end."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES / file)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(command, capture_output=True, text=True, env=environment | variables)
    assert result.returncode == 0, result.stdout[-10_000:] + result.stderr[-2_000:]
    return result.stdout


@pytest.mark.parametrize("file", ["codes.py", "arrays.py"])
def test_they_agree_with_the_oracle(file: str) -> None:
    assert " passed" in run(file, TRITON_INTERPRET="1")


@pytest.mark.long
def test_they_compile_for_a_gpu_and_wait_for_none(tmp_path: Path) -> None:
    assert " passed" in run("compiled.py", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
