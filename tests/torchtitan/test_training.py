"""torchtitan's own trainer, on its tiny Llama 3, trains as without compression."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import run

RANK = Path(__file__).with_name("rank.py")

PARALLEL: dict[str, dict[str, Any]] = {
    "shards": {"ranks": 2},
    "dtensors": {"ranks": 2, "backend": "full_dtensor"},
    "replicas": {"ranks": 4, "replicas": 2},
    "tensor": {"ranks": 4, "tensor": 2},
}
"""Settings of torchtitan, by what they show."""


def train(folder: Path, ranks: int, **settings: Any) -> list[list[float]]:
    """Return the number, the loss and the norm of the gradients of each step of a job."""
    folder.mkdir(exist_ok=True)
    place = folder / "numbers.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    ended = run([*launcher, RANK, json.dumps(settings), place], 300)
    assert ended.returncode == 0, ended.stdout[-3000:]
    found: list[list[float]] = json.loads(place.read_text())
    return found


@pytest.mark.parametrize("case", PARALLEL)
def test_losses_and_norms_are_those_without_compression(case: str, tmp_path: Path) -> None:
    job = {"steps": 3, **PARALLEL[case]}
    plain = train(tmp_path / "plain", **job)
    exact = train(tmp_path / "exact", spec="none", **job)
    few = train(tmp_path / "few", spec="qsgd:bits=8", gather="int8", **job)
    assert [step for step, _, _ in plain] == [1, 2, 3]
    assert exact == [pytest.approx(step, rel=1e-4) for step in plain]
    assert few == [pytest.approx(step, rel=1e-2) for step in plain]


def test_its_checkpoints_have_the_residuals(tmp_path: Path) -> None:
    job: dict[str, Any] = {"ranks": 2, "steps": 4, "spec": "qsgd:bits=2,feedback=on", "interval": 2}
    whole = train(tmp_path, **job)
    shutil.rmtree(tmp_path / "checkpoint" / "step-4")
    assert train(tmp_path, **job) == whole[2:]
