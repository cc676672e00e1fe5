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
    fit,
    make_model,
    state_of,
    weights,
)

from hvd_compress.errors import StateError
from hvd_compress.tensorflow import Compression

LOSSY = [
    "topk:ratio=0.01",
    "topk:ratio=0.01,start=3,warmup=8",
    "randomk:ratio=0.05",
    "int8",
    "powersgd:rank=2",
    "loco",
]


@functools.cache
def trained(spec: str) -> Tape:
    """A job after 50 steps with momentum, or 30 where there are others of its kind; tests go on with it."""
    return Tape(spec, lr=0.03).run(50 if spec in ("topk:ratio=0.01", "powersgd:rank=2") else 30)


@pytest.mark.parametrize("spec", LOSSY)
def test_ranks_stay_equal_and_learn(spec: str) -> None:
    """The loss falls well below where it started."""
    job = trained(spec)
    assert_ranks_equal(job.weights)
    x, y = batches(range(9000, 9010))
    loss, start = (float(LOSS(y, model(x))) for model in (job.model, make_model()))
    losses, starts = everyone(loss), everyone(start)
    assert np.mean(losses) < np.mean(starts) - 0.2
    assert job.compression.stats().steps >= 30


def test_fit_learns_and_saves_bytes() -> None:
    compression = Compression.topk(ratio=0.05)
    model = fit(compression, steps=60)
    assert_ranks_equal(weights(model))
    stats = compression.stats()
    assert stats.steps == 60
    assert stats.gradient_bytes == 60 * 4 * len(weights(model))
    assert stats.ratio > 4  # vectors and the small last matrix are sent in full


STATEFUL = ["topk:ratio=0.01", "randomk:ratio=0.05", "powersgd:rank=2", "topk:ratio=0.01,start=3,warmup=8"]


def checkpoint(job: Tape, with_compression: bool = True) -> Any:
    parts = {"compression": job.compression} if with_compression else {}
    return tf.train.Checkpoint(model=job.model, optimizer=job.optimizer, **parts)


@pytest.mark.parametrize(("spec", "late"), [*((spec, False) for spec in STATEFUL), (STATEFUL[0], True)])
def test_a_restored_job_goes_on_bit_for_bit(spec: str, late: bool, tmp_path: Path) -> None:
    """Restored before the first step, or after it."""
    whole, second = trained(spec), Tape(spec, lr=0.03)
    path = checkpoint(whole).write(str(tmp_path / "saved"))
    if late:
        second.run(1)
    checkpoint(second).restore(path).expect_partial()
    whole.run(range(50, 55))
    np.testing.assert_array_equal(second.run(range(50, 55)).weights, whole.weights)


def test_the_state_does_matter(tmp_path: Path) -> None:
    whole, second = trained("topk:ratio=0.01"), Tape("topk:ratio=0.01", lr=0.03)
    path = checkpoint(whole).write(str(tmp_path / "saved"))
    checkpoint(second, with_compression=False).restore(path).expect_partial()
    assert not np.array_equal(second.run(range(50, 55)).weights, whole.run(range(50, 55)).weights)


def test_a_checkpoint_of_another_rank_or_method_is_refused(tmp_path: Path) -> None:
    path = checkpoint(trained("topk:ratio=0.01")).write(str(tmp_path / "saved"))
    other_rank = everyone(path)[(hvd.rank() + 1) % hvd.size()]
    with pytest.raises(StateError, match=r"saved on rank \d of \d and cannot be restored on rank"):
        restored("topk:ratio=0.01", other_rank).run(1)
    with pytest.raises(StateError, match="by another method"):
        restored("topk:ratio=0.05", path).run(1)
    everyone("keep the files until all ranks have read them")


def restored(spec: str, path: str) -> Tape:
    job = Tape(spec)
    checkpoint(job).restore(path).expect_partial()
    return job


def test_two_models_share_a_compressor_and_nothing_else() -> None:
    compression = Compression.topk(ratio=0.05)
    alone = Tape("topk:ratio=0.05").run(4)
    first, second = Tape(compression), Tape(compression)
    for step in range(4):
        first.run(range(step, step + 1))
        second.run(range(step + 50, step + 51))
    np.testing.assert_array_equal(first.weights, alone.weights)
    assert len(compression.sessions) == 2


def test_a_new_trace_goes_on_with_the_same_state() -> None:
    """A last batch of another size makes TensorFlow trace anew."""
    job = Tape("topk:ratio=0.02").run(2)
    before = len(state_of(job.compression))
    x, y = batches(1)
    job._step(tf.constant(x[:5]), tf.constant(y[:5]), tf.constant(1.0))
    assert len(job.compression.sessions) == 1 and len(state_of(job.compression)) == before
    assert job.compression.stats().steps == 3


def test_random_generators_are_left_alone() -> None:
    tf.random.set_seed(5)
    first = tf.random.uniform([3]).numpy()
    tf.random.set_seed(5)
    Tape("powersgd:rank=2").run(1)
    Tape("int8").run(1)
    np.testing.assert_array_equal(tf.random.uniform([3]).numpy(), first)


def test_error_on_request() -> None:
    """Without loss it is zero, with loss it is not."""
    assert Tape("topk:ratio=1.0,measure=on").run(3).compression.stats().vnmse == pytest.approx(0, abs=1e-12)
    error = Tape("topk:ratio=0.05,measure=on").run(3).compression.stats().vnmse
    assert error is not None and 0.1 < error < 2
    assert everyone(error) == [error] * hvd.size()
