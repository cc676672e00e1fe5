"""What ``hvd-compress doctor`` sees: this machine, and Horovods that are broken on purpose."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doctor.machines import machine

import hvd_compress
from hvd_compress.tools.doctor import facts
from hvd_compress.tools.doctor.frames import horovod_folder
from hvd_compress.tools.doctor.probe import MARK
from hvd_compress.tools.doctor.rules import judge


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose packages come before those that are installed."""
    monkeypatch.delitem(sys.modules, "horovod", raising=False)  # an earlier test's, which would be found first
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_nothing_is_imported_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("hvd_compress", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('this is of the current folder')")
    monkeypatch.chdir(tmp_path)
    code = "import hvd_compress, numpy; print(hvd_compress.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=facts.environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == hvd_compress.__file__


def test_a_package_that_is_not_there() -> None:
    assert facts.look("no_such_framework") == {}


@pytest.mark.slow
def test_a_broken_framework_is_survived(elsewhere: Path) -> None:
    for code, error in {
        "raise OSError('libtorch.so: undefined symbol')": "OSError: libtorch.so: undefined symbol",
        "import os; os.abort()": "ended with status -6",
    }.items():
        (elsewhere / "torch.py").write_text(code)
        found = facts._framework("torch", facts.look("torch"))
        assert found.stage == "framework" and found.error.startswith(error)
        [fault] = [finding for finding in judge(machine(found)) if finding.status == "fault"]
        assert "PyTorch" in fault.subject


@pytest.mark.long
def test_a_horovod_built_without_torch(elsewhere: Path) -> None:
    """It imports without an error, so its silence must be noticed."""
    installed = horovod_folder()
    assert installed
    ignore = shutil.ignore_patterns("mpi_lib*", "mxnet", "ray", "spark", "__pycache__", "data")
    shutil.copytree(installed, elsewhere / "horovod", ignore=ignore)
    (elsewhere / "horovod" / "metadata.json").write_text('{"tensorflow": "2.15.1"}')
    importlib.invalidate_caches()  # the folder may have been listed within the same tick
    found = facts._framework("torch", facts.look("torch"))
    assert (found.stage, found.against) == ("horovod", None)
    [fault] = [finding for finding in judge(machine(found)) if finding.status == "fault"]
    assert fault.cure and "HOROVOD_WITH_PYTORCH=1" in fault.cure.command


def test_what_was_found_before_the_end_counts() -> None:
    lines = [f"{MARK}{json.dumps(line)}" for line in ({"stage": "framework"}, {"version": "9"}, {"stage": "horovod"})]
    found = facts.read("\n".join(["noise", *lines]), "ended with status -11: it printed nothing")
    assert found == {"version": "9", "stage": "horovod", "error": "ended with status -11: it printed nothing"}


def test_scripts_tell_their_python(tmp_path: Path) -> None:
    script = tmp_path / "horovodrun"
    for first, expected in [
        (f"#!{sys.executable}", None),
        ("#!/usr/bin/env python3", None),
        ("#!/bin/sh", None),
        (f"#!{tmp_path}/bin/python3.9", f"{tmp_path}/bin/python3.9"),
    ]:
        script.write_text(f"{first}\n")
        assert facts.other_python(script) == expected


def test_makes_of_mpi() -> None:
    assert facts.mpi_name("mpirun (Open MPI) 4.1.4\n\nReport bugs to ...") == "Open MPI 4.1.4"
    assert facts.mpi_name("HYDRA build details:\n    Version: 4.0") == "HYDRA build details:"
    assert facts.mpi_name("") == "of unknown version"
