"""Ranks may trace at other times, and in another order: Horovod asks only that all run what one of them runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from parallel.keras.training import Tape, assert_ranks_equal, batches, everyone, small_model

from hvd_compress.errors import DisagreementError


def trace(job: Tape) -> None:
    """Build the graph of a step, and do not run it."""
    x, y = batches(1)
    job._step.get_concrete_function(tf.constant(x), tf.constant(y), tf.constant(1.0))


def two_jobs(spec: str) -> list[Tape]:
    """Of models that differ."""
    return [Tape(spec, model=small_model(units)) for units in (40, 48)]


@pytest.mark.parametrize("spec", ["topk:ratio=0.05,start=2", "none"])
def test_models_that_are_traced_in_another_order(spec: str) -> None:
    jobs = two_jobs(spec)
    for job in jobs[:: -1 if hvd.rank() == 1 else 1]:
        trace(job)
    for job in jobs:
        assert_ranks_equal(job.run(3).weights)
        assert job.compression.stats().steps == 3


@pytest.mark.parametrize("spec", ["topk", "none"])
def test_a_model_that_one_rank_has_traced_long_ago(spec: str) -> None:
    """The others come to it only after they have run another one."""
    jobs = two_jobs(spec)
    if hvd.rank() == 1:
        trace(jobs[1])
    for job in jobs:
        assert_ranks_equal(job.run(3).weights)


@pytest.mark.parametrize("function", [tf.function, lambda f: f], ids=["graph", "eager"])
def test_models_of_which_no_other_rank_knows(function: Any) -> None:
    """They have nothing in common, and all ranks wait for the others."""
    variables = [tf.Variable(tf.ones((40, 40)), name=f"known.to.{hvd.rank()}")]
    model = SimpleNamespace(trainable_variables=variables)
    job = Tape("topk", function, model, loss=lambda model, x, y: tf.reduce_sum(model.trainable_variables[0] ** 2))
    with pytest.raises((DisagreementError, tf.errors.InvalidArgumentError)) as error:
        job.gradients(0)
    assert "the ranks disagree on the parameters: rank 0 has 'known.to.0:0'" in str(error.value)
    assert all(everyone(True))
    Tape("topk", model=small_model()).run(1)
