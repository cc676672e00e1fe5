"""Horovod is started once for all tests of a job."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import horovod.torch as hvd
import pytest
import torch
from parallel.pytorch.ddp_training import group_of
from parallel.pytorch.training import EVEN, ODD, SIZE


@pytest.fixture(scope="session", autouse=True)
def _horovod(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(1)
    hvd.init(process_sets=[EVEN, ODD])
    gc.freeze()  # tests that collect garbage need not look at what was imported
    yield
    if not request.session.testsfailed:
        hvd.barrier()  # the first rank that shuts down ends Horovod for all
    hvd.shutdown()


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The default process group of `torch.distributed`."""
    place = hvd.broadcast_object(str(tmp_path_factory.mktemp("group") / "store"))
    with group_of(SIZE, place):
        yield
