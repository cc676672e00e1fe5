"""With loss: ranks never drift apart, and state is saved and restored."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from parallel.keras.training import (
    LOSS,
    Tape,
    assert_ranks_equal,
    batches,
    everyone,
    small_model,
    state_of,
    trained_fit,
    weights,
)

from hvd_compress.errors import StateError

SPEC = "topk:ratio=0.01"


@functools.cache
def trained(spec: str) -> Tape:
    """A job after 30 steps with momentum; tests go on with it."""
    return Tape(spec, model=small_model(48, 40), lr=0.03).run(30)


def checkpoint(job: Tape) -> Any:
    """All that a job has to keep."""
    return tf.train.Checkpoint(model=job.model, optimizer=job.optimizer, compression=job.compression)


@pytest.mark.parametrize(
    ("spec", "late"),
    [
        (SPEC, True),
        *(
            pytest.param(spec, False, marks=pytest.mark.long)
            for spec in ("powersgd:rank=2", "topk:ratio=0.01,start=3,warmup=8", "randomk:ratio=0.05", "int8", "loco")
        ),
    ],
)
def test_ranks_stay_equal_and_learn_and_a_restored_job_goes_on(spec: str, late: bool, tmp_path: Path) -> None:
    """The loss falls well below where it started. Restored before the first step, or after it; bit for bit."""
    whole, second = trained(spec), Tape(spec, model=small_model(48, 40), lr=0.03)
    assert_ranks_equal(whole.weights)
    x, y = batches(range(9000, 9010))
    loss, start = (float(LOSS(y, model(x))) for model in (whole.model, second.model))
    losses, starts = everyone(loss), everyone(start)
    assert np.mean(losses) < np.mean(starts) - 0.2
    assert whole.compression.stats().steps == 30
    assert not whole.compression.trainable_variables

    path = checkpoint(whole).write(str(tmp_path / "saved"))
    if late:
        second.run(1)
    checkpoint(second).restore(path).expect_partial()
    whole.run(range(50, 55))
    np.testing.assert_array_equal(second.run(range(50, 55)).weights, whole.weights)


def test_a_checkpoint_of_another_rank_or_method_is_refused(tmp_path: Path) -> None:
    path = checkpoint(trained(SPEC)).write(str(tmp_path / "saved"))
    other_rank = everyone(path)[(hvd.rank() + 1) % hvd.size()]
    with pytest.raises(StateError, match=r"saved on rank \d of \d and cannot be restored on rank"):
        restored(SPEC, other_rank).run(1)
    with pytest.raises(StateError, match="by another method"):
        restored("topk:ratio=0.05", path).run(1)
    everyone("keep the files until all ranks have read them")


def restored(spec: str, path: str) -> Tape:
    job = Tape(spec, model=small_model(48, 40))
    checkpoint(job).restore(path).expect_partial()
    return job


def test_fit_saves_bytes() -> None:
    model, compression = trained_fit()
    assert_ranks_equal(weights(model))
    stats = compression.stats()
    assert stats.steps == 8
    assert stats.gradient_bytes == 8 * 4 * len(weights(model))
    assert stats.ratio > 8


def test_a_new_trace_goes_on_with_the_same_state() -> None:
    """A last batch of another size makes TensorFlow trace anew."""
    job = Tape("topk:ratio=0.02", model=small_model()).run(2)
    before = len(state_of(job.compression))
    x, y = batches(1)
    job._step(tf.constant(x[:5]), tf.constant(y[:5]), tf.constant(1.0))
    assert len(job.compression.sessions) == 1 and len(state_of(job.compression)) == before
    assert job.compression.stats().steps == 3


def test_random_generators_are_left_alone() -> None:
    tf.random.set_seed(5)
    first = tf.random.uniform([3]).numpy()
    tf.random.set_seed(5)
    for spec in ("powersgd:rank=2", "int8"):
        Tape(spec, lambda f: f, small_model()).run(1)
    np.testing.assert_array_equal(tf.random.uniform([3]).numpy(), first)


def test_error_on_request() -> None:
    """The same on all ranks."""
    error = Tape("topk:ratio=0.05,measure=on", model=small_model()).run(3).compression.stats().vnmse
    assert error is not None and 0.1 < error < 2
    assert everyone(error) == [error] * hvd.size()
