"""A rank that has joined: it adds nothing to the sums of the others, with the methods that are plain allreduces."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import horovodrun

pytestmark = pytest.mark.jobs

PROGRAM = Path(__file__).parent / "parallel" / "joined_keras.py"


@pytest.mark.long
@pytest.mark.parametrize(("spec", "controller"), [("none", "gloo"), ("fp16", "mpi")])
def test_a_rank_that_has_joined_before_the_others_trace(spec: str, controller: str) -> None:
    output = horovodrun(2, controller, PROGRAM, spec).stdout
    assert [f"rank {rank} has {2 if rank == 0 else 0}" in output for rank in range(2)] == [True] * 2
