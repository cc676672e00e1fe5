"""Other lists of variables: layers that are unfrozen, lists that take turns, several models."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf
from parallel.keras.training import (
    LOSS,
    Arr,
    Tape,
    assert_ranks_equal,
    batches,
    everyone,
    fit,
    small_model,
    state_of,
    trained_fit,
    weights,
)

from hvd_compress.tensorflow import Compression

SHAPES = {"a": (32, 40), "b": (40, 32), "c": (64, 20)}


class Lists:
    """Gradients that are told, summed for any list of the same variables."""

    def __init__(self, spec: str) -> None:
        self.compression = Compression.parse(spec, merge=1)
        self._variables = {name: tf.Variable(tf.zeros(shape), name=name) for name, shape in SHAPES.items()}
        self._rng = np.random.default_rng(hvd.rank())
        self.given = self.got = 0.0

    def sum(self, names: str, scale: float = 1.0) -> list[Arr]:
        """One step for some of the variables, with positive gradients; counts what went in and what came out."""
        variables = [self._variables[name] for name in names]
        gradients = [self._rng.uniform(0, scale, v.shape).astype(np.float32) for v in variables]
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, gradients, strict=True)])
        tape = hvd.DistributedGradientTape(tape, compression=self.compression, op=hvd.Sum)
        totals = [total.numpy() for total in tape.gradient(loss, variables)]
        self.given += float(sum(g.astype(float).sum() for g in gradients))
        self.got += float(sum(total.astype(float).sum() for total in totals))
        return totals

    def residuals(self) -> list[Arr]:
        """Of the sessions, in the order in which they came: flat, from the last variable to the first."""
        return [leaf for path, leaf in state_of(self.compression).items() if path.endswith("residual")]


def test_a_new_list_goes_on_with_what_was_kept() -> None:
    """The residual moves, so it is not sent twice if the old list comes again; steps count on."""
    job = Lists("topk:ratio=0.05,start=2")
    for _ in range(3):
        job.sum("ab")
    (before,) = job.residuals()
    totals = job.sum("abc", scale=0.0)
    assert sum(map(np.count_nonzero, totals)) < 0.15 * sum(total.size for total in totals)  # no dense steps again
    old, new = job.residuals()
    rest = new[-before.size :]
    assert not old.any()
    assert ((rest == before) | (rest == 0)).all() and (rest == before).mean() > 0.85


def test_nothing_is_lost_or_sent_twice() -> None:
    """Whatever lists take turns: what came out and what is kept add up to what went in."""
    job = Lists("topk:ratio=0.05")
    for names in ("ab", "abc", "ab", "bc", "abc", "ab"):
        job.sum(names)
    kept = float(sum(residual.astype(float).sum() for residual in job.residuals()))
    assert len(job.residuals()) == 3
    assert sum(everyone(kept)) > 0.1 * sum(everyone(job.given))
    assert job.got + sum(everyone(kept)) == pytest.approx(sum(everyone(job.given)), rel=1e-5)


def test_a_checkpoint_has_the_last_word(tmp_path: Path) -> None:
    """A list that comes again after a restart goes on with what was saved, not with what a shorter list kept."""
    job, second = Lists("topk:ratio=0.05"), Lists("topk:ratio=0.05")
    job.sum("ab")
    job.sum("abc")
    path = tf.train.Checkpoint(compression=job.compression).write(str(tmp_path / "saved"))
    second.sum("ab")
    tf.train.Checkpoint(compression=second.compression).restore(path).expect_partial()
    for total, expected in zip(second.sum("abc", scale=0.0), job.sum("abc", scale=0.0), strict=True):
        np.testing.assert_array_equal(total, expected)


def test_a_layer_is_unfrozen() -> None:
    """Keras compiles the model again; the compressor goes on."""
    compression = Compression.topk(ratio=0.05)
    model = small_model(48, 40)
    model.layers[0].trainable = False
    fit(compression, 4, model=model)
    (before,) = [leaf for path, leaf in state_of(compression).items() if path.endswith("residual")]
    frozen = model.layers[0].kernel.numpy()
    model.layers[0].trainable = True
    fit(compression, 4, model=model)
    first, *others = [leaf for path, leaf in state_of(compression).items() if path.endswith("residual")]
    assert before.any() and not first.any() and all(other.any() for other in others)
    np.testing.assert_array_equal(frozen, small_model(48, 40).layers[0].kernel)
    assert not np.array_equal(frozen, model.layers[0].kernel)
    assert compression.stats().steps == 8
    assert_ranks_equal(weights(model))


def test_two_models_are_fitted_in_turns() -> None:
    compression = Compression.topk(ratio=0.05)
    models = [compiled(compression) for _ in range(2)]
    x, y = batches(8)
    for half in (slice(0, 64), slice(64, 128)):
        models[0].fit(x[half], y[half], batch_size=16, verbose=0, shuffle=False)
        models[1].fit(x[half] + 1, y[half], batch_size=16, verbose=0, shuffle=False)
    np.testing.assert_array_equal(weights(models[0]), weights(trained_fit()[0]))
    assert_ranks_equal(weights(models[1]))
    assert len(compression.sessions) == 2


def compiled(compression: Any) -> Any:
    """A model with a compressed optimizer."""
    model = small_model()
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1, momentum=0.9), compression=compression)
    model.compile(optimizer=optimizer, loss=LOSS)
    return model


def test_models_of_equal_shapes_have_states_of_their_own_without_a_function() -> None:
    """Horovod runs a graph that it has traced for all eager tapes of a compressor with gradients of the same shapes."""
    spec, rates = "topk:ratio=0.05", (0.1, 0.05)
    compression = Compression.parse(spec)
    jobs = [Tape(compression, lambda f: f, small_model(), rate) for rate in rates]
    for step in range(4):
        for job in jobs:
            job.run(range(step, step + 1))
    for job, rate in zip(jobs, rates, strict=True):
        np.testing.assert_array_equal(job.weights, Tape(spec, lambda f: f, small_model(), rate).run(4).weights)
    sessions = list(compression.sessions.values())
    assert [session.steps for session in sessions] == [4, 4]
    del job, jobs
    gc.collect()
    assert not compression.sessions and all(session.released for session in sessions)


def test_models_that_are_gone_leave_nothing_behind() -> None:
    """Horovod keeps every compressor that it has met; a session goes with the variables of its model."""
    compression = Compression.topk(ratio=0.05)
    Tape(compression, model=small_model()).run(1)
    assert len(compression.sessions) == 1
    gc.collect()
    assert not compression.sessions
    job = Tape(compression, model=small_model()).run(1)
    (name,) = compression.sessions
    assert name.endswith("_1") and job.compression is compression  # numbered alike on all ranks, whoever collects first


def left_by_models(compression: Any) -> tuple[int, list[int]]:
    """Make, train and delete models; return the growth of memory in MiB, and of the numbers of threads and files."""
    trim = ctypes.CDLL(None).malloc_trim  # what is free counts no more
    alive, used = [], []
    x, y = np.ones((8, 64), np.float32), np.ones((8, 4096), np.float32)
    with open("/proc/self/statm") as pages:
        for _ in range(3):
            tf.keras.backend.clear_session()
            model = tf.keras.Sequential([tf.keras.Input((64,)), *(tf.keras.layers.Dense(4096) for _ in range(2))])
            optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(1e-4), compression=compression)
            model.compile(optimizer=optimizer, loss="mse")
            model.fit(x, y, batch_size=8, verbose=0)
            alive.append(weakref.ref(model.layers[0].kernel))
            del model, optimizer
            gc.collect()
            trim(0)
            pages.seek(0)
            opened = [len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")]
            used.append([int(pages.read().split()[1]) * 4096 >> 20, *opened])
    assert [number for number, one in enumerate(alive) if one() is not None] == []
    memory, *opened = [last - first for first, last in zip(used[0], used[-1], strict=True)]
    return memory, opened


def test_models_that_were_fitted_leave_no_more_than_with_horovod_alone() -> None:
    """TensorFlow keeps the graphs of Keras's training steps: ours are larger, but no residual of 65 MiB stays."""
    compression = Compression.topk(ratio=0.05)
    stock_memory, stock_opened = left_by_models(hvd.Compression.none)
    memory, opened = left_by_models(compression)
    assert not compression.sessions
    assert memory - stock_memory < 100, (memory, stock_memory)
    assert all(ours <= stock for ours, stock in zip(opened, stock_opened, strict=True)), (opened, stock_opened)


def test_two_models_of_equal_names_in_one_graph() -> None:
    """As a GAN of dense layers: the collectives of the two have equal names, and must not be under way at once."""
    spec, rates = "powersgd:rank=2", (0.1, 0.05)
    jobs = [Tape(spec, lambda f: f, small_model(), rate) for rate in rates]

    @tf.function  # type: ignore[untyped-decorator]
    def both(x: Any, y: Any) -> Any:
        return [job._gradients(x, y, 1.0) for job in jobs]

    for step in range(4):
        for job, gradients in zip(jobs, both(*map(tf.constant, batches(range(step, step + 1)))), strict=True):
            job.optimizer.apply_gradients(zip(gradients, job.model.trainable_variables, strict=True))
    for job, rate in zip(jobs, rates, strict=True):
        np.testing.assert_allclose(
            job.weights, Tape(spec, model=small_model(), lr=rate).run(4).weights, rtol=1e-5, atol=1e-6
        )
