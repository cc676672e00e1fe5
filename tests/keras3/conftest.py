"""Horovod is started once for all tests of a job."""

from __future__ import annotations

from collections.abc import Iterator

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from keras3.training import ALONE


@pytest.fixture(scope="session", autouse=True)
def _horovod() -> Iterator[None]:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init(process_sets=ALONE)
    yield
    hvd.shutdown()
