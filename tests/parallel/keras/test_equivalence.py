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
    small_model,
    weights,
)

from hvd_compress.keras import DistributedOptimizer
from hvd_compress.tensorflow import Compression

PLAIN = hvd.Compression.none


@functools.cache
def plain_fit() -> Arr:
    return weights(fit(PLAIN, model=model()))


def model() -> Any:
    """Two matrices and a vector: a bucket of each, and one that is not compressed."""
    return small_model(48, 40)


def assert_equal_training(plain: Arr, compressed: Arr) -> None:
    """Both have trained, to the same weights up to float rounding."""
    assert np.abs(plain - weights(model())).max() > 0.01
    np.testing.assert_allclose(compressed, plain, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        pytest.param("topk:ratio=1.0", {}, id="graph"),
        pytest.param("topk:ratio=1.0", {"eager": True}, id="eager"),
        pytest.param(
            "topk:ratio=1.0", {"groups": 2, "gradient_predivide_factor": 2.0}, id="groups", marks=pytest.mark.long
        ),
        *(pytest.param(spec, {}, id=spec, marks=pytest.mark.long) for spec in LOSSLESS[1:]),
    ],
)
def test_fit(spec: str, options: dict[str, Any]) -> None:
    """All of these train on the mean of the gradients."""
    compressed = weights(fit(spec, model=model(), **options))
    assert_equal_training(plain_fit(), compressed)
    assert_ranks_equal(compressed)


def test_legacy_optimizer_and_merged_buckets() -> None:
    compression = Compression.topk(ratio=1.0, merge="layer")
    assert_equal_training(plain_fit(), weights(fit(compression, model=model(), kind=tf.keras.optimizers.legacy.SGD)))


def test_passes_and_sum_with_the_optimizer_of_this_package() -> None:
    """Which is Horovod's, on Keras 2."""
    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": True, "op": hvd.Sum}
    plain = fit(PLAIN, model=small_model(), **options)
    compressed = fit("topk:ratio=1.0", model=small_model(), distribute=DistributedOptimizer, **options)
    assert np.abs(weights(plain) - weights(small_model())).max() > 0.01
    np.testing.assert_allclose(weights(compressed), weights(plain), rtol=0, atol=5e-5)
    assert_ranks_equal(weights(compressed))


SUM: dict[str, Any] = {"op": hvd.Sum, "groups": 2, "lr": 0.03}


@functools.cache
def plain_tape() -> Arr:
    return Tape(PLAIN, model=model(), **SUM).run(4).weights


@pytest.mark.parametrize("function", [tf.function, lambda f: f], ids=["graph", "eager"])
def test_tape(function: Any) -> None:
    compressed = Tape("topk:ratio=1.0", function, model(), **SUM).run(4).weights
    assert_equal_training(plain_tape(), compressed)
    assert_ranks_equal(compressed)


def test_functions_run_eagerly() -> None:
    """The debugging mode in which even Horovod's own functions run op by op."""
    expected = plain_tape()
    tf.config.run_functions_eagerly(True)
    try:
        job = Tape("topk:ratio=1.0", model=model(), **SUM).run(4)
    finally:
        tf.config.run_functions_eagerly(False)
    assert_equal_training(expected, job.weights)
    assert job.compression.stats().steps == 4


def test_process_sets_train_apart() -> None:
    process_set = EVEN if hvd.rank() % 2 == 0 else ODD
    plain = Tape(PLAIN, model=model(), process_set=process_set).run(4).weights
    compressed = Tape("topk:ratio=1.0", model=model(), process_set=process_set).run(4).weights
    assert_equal_training(plain, compressed)
    assert_ranks_equal(compressed, process_set)
    everyone("here")  # a rank that ended now would end the process set of the others


@pytest.mark.parametrize("dtype", [tf.float16, tf.int32])
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


def test_unusual_variables() -> None:
    """Compressed or not, in a graph or not."""
    plain = Tape(PLAIN, model=Odds()).gradients(0)
    for spec, function in (("topk:ratio=1.0,min_size=0,vectors=on", tf.function), ("topk:ratio=1.0", lambda f: f)):
        compressed = Tape(spec, function, Odds()).gradients(0)
        assert plain[-1] is None and compressed[-1] is None
        for a, b in zip(plain[:-1], compressed[:-1], strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def embedding() -> Any:
    """A model that begins with a table of 50 rows, of which each batch uses some."""
    table = np.random.default_rng(0).standard_normal((50, 32)).astype(np.float32)
    embed = tf.keras.layers.Embedding(50, 32, embeddings_initializer=tf.keras.initializers.Constant(table))
    return tf.keras.Sequential([embed, tf.keras.layers.Flatten(), *small_model().layers])


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


@pytest.mark.parametrize(
    ("way", "as_dense"), [("fit", False), ("tape", True), pytest.param("eager tape", False, marks=pytest.mark.long)]
)
def test_indexed_slices_beside_compressed_gradients(way: str, as_dense: bool, caplog: pytest.LogCaptureFixture) -> None:
    """16 rows of 32 numbers with their indices, in each of 4 steps, as they are: not in the ratio without a word."""
    plain, compression = Compression.parse("none"), Compression.topk(ratio=1.0)
    expected = train_a_table(way, plain, as_dense)
    assert not said(caplog)
    compressed = train_a_table(way, compression, as_dense)
    np.testing.assert_allclose(compressed, expected, rtol=0, atol=2e-5)
    assert_ranks_equal(compressed)
    if as_dense:
        assert not said(caplog)
        assert compression.stats().gradient_bytes == 4 * 4 * len(compressed)
        return
    dense = 4 * 4 * len(weights(small_model()))
    for stats in (plain.stats(), compression.stats()):
        assert stats.gradient_bytes - dense - 4 * 16 * 32 * 4 in (4 * 16 * 4, 4 * 16 * 8)
        assert stats.bytes_sent >= stats.gradient_bytes
    (message,) = said(caplog)
    assert re.search(r"of embedding(_\d+)?/embeddings:0 travel uncompressed.*sparse_as_dense", message)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What has been logged of sparse gradients."""
    messages = [record.getMessage() for record in caplog.records if record.name == "hvd_compress"]
    return [message for message in messages if "sparse gradients" in message]
