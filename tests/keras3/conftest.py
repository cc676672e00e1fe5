"""Horovod is started once for all tests of a job."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from keras3.training import ALONE, everyone


@pytest.fixture(scope="session", autouse=True)
def _horovod(request: pytest.FixtureRequest) -> Iterator[None]:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init(process_sets=ALONE)
    gc.freeze()  # what TensorFlow is made of would be looked through again and again while graphs are traced
    yield
    if not request.session.testsfailed:
        everyone("done")  # the first rank that shuts down ends Horovod for all
    hvd.shutdown()
