"""FSDP2 on nodes of several ranks: shards within a node, compression between the nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs

RANK = Path(__file__).with_name("fsdp_rank.py")


@pytest.mark.parametrize("shards", [2, pytest.param(1, marks=pytest.mark.long)])
def test_nodes_of_two_ranks_equal_plain_training(shards: int, tmp_path: Path) -> None:
    """Each node holds the model once, or twice: then both ranks of a node are replicas."""
    command = [sys.executable, str(RANK), str(tmp_path / "store"), str(shards)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"},
        )
        for rank in range(4)
    ]
    try:
        printed = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert printed == ["trained\n"] * 4
