"""All checks by name."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu_check import kernels, methods, steps

CASES = Path(__file__).resolve().parents[2] / "tests/kernels/cuda"
NO_GPU = "not run: no GPU"
TIME_LIMIT = 150
"""Seconds of a check in a process of its own."""

PLUGINS = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
"""Options of pytest: the first plugin writes to the clone, the second one refuses to run beside xdist."""

LINES = 60
"""Lines of pytest's output that are shown where a test fails."""


class Found(NamedTuple):
    """Result of a check.

    Attributes:
        state: ``"passed"``, ``"measured"``, or ``"failed: ..."`` or ``"not run: ..."`` with the reason.
        rows: Measurements.
    """

    state: str
    rows: list[dict[str, Any]] = []  # noqa: RUF012


def oracle(cpu: bool) -> Found:
    """Compare every kernel with the oracle, by the tests of the package; in parallel where pytest-xdist is there."""
    files = [str(CASES / "arrays.py")] if cpu else [str(CASES / "arrays.py"), str(CASES / "codes.py")]
    parallel = ["-n", str(min(12, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") and not cpu else []
    command = [sys.executable, "-m", "pytest", "-q", *PLUGINS, *parallel, *files]
    code, output = _run(command, cpu)
    state = "not run: no GPU; passed in Triton's interpreter" if cpu else "passed"
    lines = output.strip().splitlines() or [""]
    rows = [{"pytest": line} for line in (lines[-1:] if code == 0 else lines[-LINES:])]
    return Found(state if code == 0 else "failed: see what pytest says", rows)


def speed(cpu: bool) -> Found:
    """Time each kernel in units of a copy on the device."""
    return Found("not run: no GPU, kernels were interpreted" if cpu else "measured", kernels.measure(cpu))


def training(cpu: bool) -> Found:
    """Time whole steps through `torch.distributed`."""
    return _on_ranks(steps.measure, cpu, "measured")


def agreement(cpu: bool) -> Found:
    """Compare the weights that every method gives on the GPU with those on the CPU."""
    return _on_ranks(methods.compare, cpu, "passed")


def _on_ranks(work: steps.Work, cpu: bool, good: str) -> Found:
    """Run a program over NCCL with one rank, and over Gloo with two."""
    jobs = [("gloo" if cpu else steps.NCCL, 1), ("gloo", 2)]
    rows = [row for backend, ranks in jobs for row in steps.on_ranks(work, backend, ranks, cpu)]
    failed = sum("error" in row for row in rows)
    state = "not run: no GPU, steps were made on the CPU" if cpu else good
    return Found(f"failed: {failed} errors" if failed else state, rows)


def races(cpu: bool) -> Found:
    """Encode and decode on several streams at a time: the bits must be those of one stream."""
    if cpu:
        return Found(NO_GPU)
    wrong = kernels.races()
    return Found(f"failed: {wrong} results differ" if wrong else "passed")


def sanitizer(cpu: bool) -> Found:
    """Run some kernels under compute-sanitizer."""
    if cpu:
        return Found(NO_GPU)
    if not (program := shutil.which("compute-sanitizer")):
        return Found("not run: compute-sanitizer is not installed")
    command = [program, "--error-exitcode=1", sys.executable, "-m", "pytest", "-q", *PLUGINS]
    command += [str(CASES / "codes.py"), "-k", "special"]
    code, output = _run(command, cpu)
    lines = [line for line in output.splitlines() if "ERROR SUMMARY" in line or " passed" in line or " failed" in line]
    return Found("passed" if code == 0 else f"failed: exit status {code}", [{"summary": "; ".join(lines)}])


def _run(command: list[str], cpu: bool) -> tuple[int, str]:
    """Run a command in the tests; return its exit status and what it printed."""
    root = CASES.parents[2]
    variables = os.environ | {"PYTHONPATH": f"{root}:{root / 'tests'}", "TRITON_INTERPRET": str(int(cpu))}
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, cwd=root / "tests", env=variables, timeout=TIME_LIMIT
        )
    except subprocess.TimeoutExpired:
        return 124, f"ended after {TIME_LIMIT} s"
    return ran.returncode, ran.stdout + ran.stderr


CHECKS: dict[str, Callable[[bool], Found]] = {
    "oracle": oracle,
    "methods": agreement,
    "kernels": speed,
    "steps": training,
    "streams": races,
    "sanitizer": sanitizer,
}

torch.manual_seed(0)
