"""The driver for mpi4py, under mpirun: every method, with 2 and 3 ranks. What is tested stands in tests/mpi."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import AS_ROOT, run

pytestmark = pytest.mark.jobs

TESTS = Path(__file__).resolve().parent


def mpirun(ranks: int, job: Path, *arguments: str) -> str:
    """Run a program on several ranks of this machine; an error on one ends them all. Gives what they print."""
    launcher = ["mpirun", "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", "-n", str(ranks)]
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    program = [sys.executable, "-W", "error", "-m", "mpi4py", str(job), *arguments]
    result = run([*launcher, *program], timeout=300, environment={**AS_ROOT, "PYTHONPATH": path})
    assert result.returncode == 0, f"mpirun ended with {result.returncode}:\n{result.stdout}"
    return result.stdout


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("job", ["methods", "collectives", "behaviour"])
def test_under_mpirun(job: str, ranks: int) -> None:
    assert mpirun(ranks, TESTS / "mpi" / f"{job}_job.py").count("all is well on rank") == ranks


def printed(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_it_loads_no_framework_and_no_horovod() -> None:
    known = {"torch", "tensorflow", "keras", "horovod", "mpi4py"}
    assert printed(f"import hvd_compress.mpi, sys; print(*({known} & set(sys.modules)))").split() == ["mpi4py"]


@pytest.mark.parametrize(
    "lacking", ["sys.modules['mpi4py'] = None", "sys.modules['mpi4py'] = __import__('types').ModuleType('mpi4py')"]
)
def test_a_missing_package_is_named_with_its_cure(lacking: str) -> None:
    code = f"""
import sys
{lacking}
import hvd_compress
try:
    import hvd_compress.mpi
except hvd_compress.CompressionError as error:
    print(type(error).__name__, error)
"""
    words = printed(code)
    assert words.startswith("MissingPackageError") and "pip install '.[mpi]'" in words
