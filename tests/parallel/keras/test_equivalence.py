"""Where nothing is lost, training is what it is without compression, in every way of using stock Horovod."""

from __future__ import annotations

import functools
import re
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from parallel.keras.training import (
    EVEN,
    LOSS,
    LOSSLESS,
    ODD,
    Arr,
    Tape,
    assert_ranks_equal,
    batches,
    everyone,
    fit,
    make_model,
    weights,
)

from hvd_compress.tensorflow import Compression

PLAIN = hvd.Compression.none

FITS: dict[str, dict[str, Any]] = {
    "graph": {},
    "eager": {"eager": True},
    "groups": {"groups": 2},
    "passes": {"backward_passes_per_step": 2},
    "sum": {"op": hvd.Sum, "lr": 0.03},
    "predivide": {"gradient_predivide_factor": 2.0},
}


@functools.cache
def plain_fit(use: str) -> Arr:
    return weights(fit(PLAIN, **FITS[use]))


def assert_equal_training(plain: Arr, compressed: Arr) -> None:
    """Both have trained, to the same weights up to float rounding."""
    assert np.abs(plain - weights(make_model())).max() > 0.01
    np.testing.assert_allclose(compressed, plain, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("spec", "use"),
    [*(("topk:ratio=1.0", use) for use in FITS), *((spec, "graph") for spec in ("none", *LOSSLESS[1:]))],
)
def test_fit(spec: str, use: str) -> None:
    compressed = weights(fit(spec, **FITS[use]))
    assert_equal_training(plain_fit(use), compressed)
    assert_ranks_equal(compressed)


def test_merging_changes_nothing() -> None:
    assert_equal_training(plain_fit("graph"), weights(fit(Compression.topk(ratio=1.0, merge="layer"))))


def test_legacy_optimizer() -> None:
    def train(compression: Any) -> Arr:
        model = make_model()
        sgd = tf.keras.optimizers.legacy.SGD(0.1, momentum=0.9)
        optimizer = hvd.keras.DistributedOptimizer(sgd, compression=compression)
        model.compile(optimizer=optimizer, loss=LOSS)
        model.fit(*batches(8), batch_size=16, verbose=0, shuffle=False)
        return weights(model)

    assert_equal_training(train(PLAIN), train(Compression.topk(ratio=1.0)))


TAPES: dict[str, dict[str, Any]] = {"average": {}, "sum": {"op": hvd.Sum, "lr": 0.03}, "groups": {"groups": 2}}


@functools.cache
def plain_tape(use: str) -> Arr:
    return Tape(PLAIN, **TAPES[use]).run(4).weights


@pytest.mark.parametrize(
    ("spec", "use"),
    [*(("topk:ratio=1.0", use) for use in TAPES), *((spec, "average") for spec in ("none", *LOSSLESS[1:]))],
)
def test_tape(spec: str, use: str) -> None:
    compressed = Tape(spec, **TAPES[use]).run(4).weights
    assert_equal_training(plain_tape(use), compressed)
    assert_ranks_equal(compressed)


def test_tape_without_a_graph() -> None:
    assert_equal_training(plain_tape("average"), Tape("topk:ratio=1.0", function=lambda f: f).run(4).weights)


def test_functions_run_eagerly() -> None:
    """The debugging mode in which even Horovod's own functions run op by op."""
    expected = plain_tape("average")
    tf.config.run_functions_eagerly(True)
    try:
        job = Tape("topk:ratio=1.0").run(4)
    finally:
        tf.config.run_functions_eagerly(False)
    assert_equal_training(expected, job.weights)
    assert job.compression.stats().steps == 4


def test_process_sets_train_apart() -> None:
    process_set = EVEN if hvd.rank() % 2 == 0 else ODD
    plain = Tape(PLAIN, process_set=process_set).run(5).weights
    compressed = Tape("topk:ratio=1.0", process_set=process_set).run(5).weights
    assert_equal_training(plain, compressed)
    assert_ranks_equal(compressed, process_set)
    everyone("here")  # a rank that ended now would end the process set of the others


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.int32])
@pytest.mark.parametrize("name", ["none", "fp16"])
def test_direct_calls_are_as_horovods_own(name: str, dtype: Any) -> None:
    tensor = tf.cast(tf.range(5) + hvd.rank(), dtype)
    mine, theirs = (
        hvd.allreduce(tensor, op=hvd.Sum, compression=getattr(catalogue, name), name=f"direct.{i}")
        for i, catalogue in enumerate((Compression, hvd.Compression))
    )
    assert mine.dtype == theirs.dtype == dtype
    np.testing.assert_array_equal(mine, theirs)


class Odds(tf.Module):  # type: ignore[misc]
    """Variables of every unusual kind: no axis, no elements, one element, double precision, unused."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        self.scale = tf.Variable(1.5)
        self.empty = tf.Variable(tf.zeros((0, 4)))
        self.one = tf.Variable([1.0])
        self.wide = tf.Variable(rng.standard_normal((32, 40)))
        self.head = tf.Variable((rng.standard_normal((40, 10)) / 6).astype(np.float32))
        self.unused = tf.Variable(tf.ones((40, 40)))

    @property
    def trainable_variables(self) -> list[Any]:
        return [self.scale, self.empty, self.one, self.wide, self.head, self.unused]

    def __call__(self, x: Any) -> Any:
        hidden = tf.cast(tf.cast(x, tf.float64) @ self.wide, tf.float32) * self.scale + tf.reduce_sum(self.empty)
        return hidden @ self.head + self.one


@pytest.mark.parametrize("spec", ["topk:ratio=1.0,min_size=0,vectors=on", "topk:ratio=1.0"])
def test_unusual_variables(spec: str) -> None:
    plain, compressed = (Tape(c, model=Odds()).gradients(0) for c in (PLAIN, spec))
    assert plain[-1] is None and compressed[-1] is None
    for a, b in zip(plain[:-1], compressed[:-1], strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def embedding() -> Any:
    """A model that begins with a table of 50 rows, of which each batch uses some."""
    table = np.random.default_rng(0).standard_normal((50, 32)).astype(np.float32)
    embed = tf.keras.layers.Embedding(50, 32, embeddings_initializer=tf.keras.initializers.Constant(table))
    return tf.keras.Sequential([embed, tf.keras.layers.Flatten(), *make_model().layers])


def train_a_table(way: str, compression: Any, as_dense: bool) -> Arr:
    """Weights after training on rows of a table, others on each rank."""
    if way == "fit":
        model = embedding()
        sgd = hvd.keras.DistributedOptimizer(
            tf.keras.optimizers.SGD(0.1), compression=compression, sparse_as_dense=as_dense
        )
        model.compile(optimizer=sgd, loss=LOSS)
        _, y = batches(4)
        model.fit(y[:, None] + hvd.rank(), y, batch_size=16, verbose=0, shuffle=False)
        return weights(model)
    loss = lambda model, x, y: tf.reduce_mean(model(y[:, None] + hvd.rank()) ** 2)  # noqa: E731
    function = (lambda f: f) if way == "eager tape" else tf.function
    return Tape(compression, function, embedding(), loss=loss, sparse_as_dense=as_dense).run(4).weights


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("way", ["fit", "tape", "eager tape"])
def test_indexed_slices_beside_compressed_gradients(way: str, as_dense: bool) -> None:
    compressed = train_a_table(way, Compression.topk(ratio=1.0), as_dense)
    np.testing.assert_allclose(compressed, train_a_table(way, PLAIN, as_dense), rtol=0, atol=2e-5)
    assert_ranks_equal(compressed)


@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "none"])
@pytest.mark.parametrize("way", ["fit", "eager tape"])
def test_indexed_slices_are_counted_and_spoken_of(way: str, spec: str, caplog: pytest.LogCaptureFixture) -> None:
    """16 rows of 32 numbers with their indices, in each of 4 steps, as they are: not in the ratio without a word."""
    compression = Compression.parse(spec)
    train_a_table(way, compression, as_dense=False)
    dense = 4 * 4 * len(weights(make_model()))
    stats = compression.stats()
    indices = stats.gradient_bytes - dense - 4 * 16 * 32 * 4
    assert indices in (4 * 16 * 4, 4 * 16 * 8)
    assert stats.bytes_sent > stats.gradient_bytes - dense
    said = [record.getMessage() for record in caplog.records if record.name == "hvd_compress"]
    assert len(said) == (spec != "none")
    for message in said:
        assert re.search(
            r"sparse gradients of embedding(_\d+)?/embeddings:0 travel uncompressed.*sparse_as_dense", message
        )
