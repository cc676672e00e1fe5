"""FSDP2 on nodes of several ranks: shards within a node, compression between the nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs

RANK = Path(__file__).with_name("fsdp_rank.py")


def test_nodes_of_two_ranks_equal_plain_training(tmp_path: Path) -> None:
    command = [sys.executable, str(RANK), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=os.environ) for rank in range(4)
    ]
    try:
        printed = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert printed == ["trained\n"] * 4
