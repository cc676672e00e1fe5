"""Pipelines that cannot be, and where ranks are; those that run are in test_jobs.py."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from torch import nn

from hvd_compress.errors import SpecError
from hvd_compress.pipeline.torch import CompressedBoundary, Pipeline
from hvd_compress.pipeline.torch.layout import Layout

TWO = [nn.Linear(2, 2), nn.Linear(2, 2)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"microbatches": 0}, "microbatches=0 is not allowed"),
        ({"link": "tcp"}, "link='tcp' is not allowed: link must be 'mpi' or 'horovod'"),
        ({"link": "horovod", "comm": 1}, "comm= is only supported with link='mpi'"),
        ({"boundary": [CompressedBoundary()] * 2}, "boundary has 2 elements: 2 stages have 1 places between them"),
    ],
)
def test_pipelines_that_cannot_be(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Pipeline(TWO, nn.functional.mse_loss, **arguments)


def test_ranks_are_dealt_out_replica_by_replica() -> None:
    layouts = [Layout(rank, 6, 3).check() for rank in range(6)]
    assert [(one.stage, one.replica) for one in layouts] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert [one.neighbour(1) for one in layouts] == [1, 2, None, 4, 5, None]
    assert [one.neighbour(-1) for one in layouts] == [None, 0, 1, None, 3, 4]
    assert {one.replicas for one in layouts} == {2}


@pytest.mark.parametrize(("ranks", "stages"), [(3, 2), (2, 3), (1, 0)])
def test_stages_that_do_not_fit(ranks: int, stages: int) -> None:
    with pytest.raises(SpecError, match=f"{stages} stages do not fit {ranks} ranks: run with as many ranks"):
        Layout(0, ranks, stages).check()


REFUSALS = """
import sys
from hvd_compress.errors import CompressionError
from hvd_compress.pipeline.torch import Pipeline
for package, link in (("mpi4py", "mpi"), ("horovod", "horovod"), (None, "horovod")):
    if package:
        sys.modules[package] = None
    try:
        Pipeline([], None, link=link)
    except CompressionError as error:
        print(type(error).__name__, str(error).replace("\\n", " "))
    sys.modules.pop(package, None)
"""


@pytest.mark.jobs
def test_what_a_link_lacks_is_named_with_its_cure() -> None:
    """In a process of its own: other tests look whether Horovod was imported."""
    said = subprocess.run([sys.executable, "-c", REFUSALS], capture_output=True, text=True, check=True).stdout
    without_mpi4py, without_horovod, not_initialised = said.splitlines()
    for error, cure in ((without_mpi4py, "pip install '.[mpi]'"), (without_horovod, "hvd-compress doctor")):
        assert error.startswith("MissingPackageError") and cure in error
    assert not_initialised.startswith("SpecError")
    assert 'call hvd.init(process_sets="dynamic") before' in not_initialised
