"""DistributedDataParallel, FSDP2, local steps and gossip with a missing rank: the others get an error in time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs

RANK = Path(__file__).with_name("ddp_rank.py")


@pytest.mark.parametrize(
    ("spec", "kind", "fault"),
    [
        ("powersgd:rank=2", "ddp", "exit"),
        ("qsgd", "sharded", "stall"),
        ("topk:ratio=0.1", "local", "exit"),
        ("topk:ratio=0.1,feedback=ef21", "gossip", "exit"),
        pytest.param("none", "gossip", "stall", marks=pytest.mark.long),
        pytest.param("qsgd", "local", "stall", marks=pytest.mark.long),
        *(pytest.param("none", "ddp", fault, marks=pytest.mark.long) for fault in ("exit", "stall")),
    ],
)
def test_a_rank_is_missing(spec: str, kind: str, fault: str, tmp_path: Path) -> None:
    command = [sys.executable, str(RANK), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), spec, fault, kind],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        printed, _ = ranks[0].communicate(timeout=50)
    finally:
        ranks[1].kill()
        ranks[1].communicate()
    assert ranks[0].returncode == 0 and printed.startswith("step 3: "), printed
    if (kind, fault) == (
        "gossip",
        "stall",
    ):  # of several sums over one connection, another one may be out of time first
        assert "Timed out" in printed or "Application timeout" in printed
    else:
        assert "Timed out" in printed if fault == "stall" else "peer" in printed
