"""The check for GPUs, without one: it runs to its end, and claims nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_without_a_gpu_it_runs_and_says_what_it_did_not(tmp_path: Path) -> None:
    results = tmp_path / "gpu.json"
    command = [sys.executable, str(ROOT / "tools/gpu_check"), "--cpu", "--json", str(results)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = {result["check"]: result for result in json.loads(results.read_text())["results"]}
    states = {name: result["state"] for name, result in found.items()}
    assert states["oracle"].endswith("passed in Triton's interpreter")
    assert all(state.startswith("not run: no GPU") for state in states.values()), states
    for name, count in (("steps", 12), ("methods", 69)):
        rows = found[name]["rows"]
        assert sorted(row["ranks"] for row in rows) == [1] * count + [2] * count
    assert all(row["ms"] is None for row in found["steps"]["rows"])
    assert all(row["differ"] == 0 for row in found["methods"]["rows"])
    assert " passed" in found["oracle"]["rows"][0]["pytest"]


@pytest.mark.parametrize(
    ("words", "message"), [([], "pass --cpu"), (["--cpu", "speed"], "unknown checks ['speed']; allowed: oracle, ")]
)
def test_without_a_gpu_it_needs_to_be_told(words: list[str], message: str) -> None:
    ran = subprocess.run([sys.executable, str(ROOT / "tools/gpu_check"), *words], capture_output=True, text=True)
    assert ran.returncode == 2 and message in ran.stderr
