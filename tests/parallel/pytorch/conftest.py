"""Horovod is started once for all tests of a job."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import horovod.torch as hvd
import pytest
import torch
from horovod.torch.mpi_ops import mpi_lib
from parallel.pytorch.ddp_training import group_of
from parallel.pytorch.race_clock import Clock
from parallel.pytorch.training import EVEN, ODD, SIZE

from hvd_compress.engine import autotune
from hvd_compress.torch.waiting import nap


@pytest.fixture(scope="session", autouse=True)
def _ranks_wait_asleep() -> None:
    """Let ranks that wait for Horovod sleep.

    Horovod calls ``sched_yield`` until it has an answer. With more ranks than cores, Linux 6.18 then gives the other
    ranks so little time that Horovod's connections run into their time limit.
    """
    wait_and_clear = mpi_lib.horovod_torch_wait_and_clear

    def wait(handle: int) -> None:
        begin = time.monotonic()
        while not mpi_lib.horovod_torch_poll(handle):
            nap(begin)
        wait_and_clear(handle)

    mpi_lib.horovod_torch_wait_and_clear = wait


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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of ``auto``."""
    made = Clock()
    monkeypatch.setattr(autotune, "time", made)
    return made
