"""Horovod is shut down and started again with other ranks, in one process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launching import mpirun

pytestmark = pytest.mark.jobs

PROGRAM = Path(__file__).parent / "parallel" / "restarted_keras.py"


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", pytest.param("auto", marks=pytest.mark.long)])
def test_other_ranks_are_refused_and_go_on_with_what_was_saved(spec: str, tmp_path: Path) -> None:
    output = mpirun([4], [sys.executable, PROGRAM, spec, tmp_path]).stdout
    for rank in range(4):
        assert f"rank {rank} refused: True, more than alone: True" in output
        assert spec != "auto" or f"rank {rank} keeps its choice: True" in output
