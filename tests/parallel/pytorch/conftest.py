"""Horovod is started once for all tests of a job."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import horovod.torch as hvd
import pytest
import torch
from parallel.pytorch.training import EVEN, ODD


@pytest.fixture(scope="session", autouse=True)
def _horovod() -> Iterator[None]:
    torch.set_num_threads(1)
    hvd.init(process_sets=[EVEN, ODD])
    gc.freeze()  # tests that collect garbage need not look at what was imported
    yield
    hvd.shutdown()
