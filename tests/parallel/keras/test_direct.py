"""Direct calls of ``hvd.allreduce`` and ``hvd.grouped_allreduce``, which keep state by name."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from parallel.keras.training import EVEN, ODD, Arr, assert_ranks_equal

from hvd_compress import LocalWorld
from hvd_compress.engine import direct_calls
from hvd_compress.tensorflow import Compression

SPEC = "topk:ratio=0.05,min_size=0"


def arrays(step: int, shape: tuple[int, ...] = (20, 12)) -> list[Arr]:
    """One for each rank."""
    rng = np.random.default_rng([step, *shape])
    return [rng.standard_normal(shape).astype(np.float32) for _ in range(hvd.size())]


def mine(step: int, *shape: int) -> tf.Tensor:
    """That of this rank."""
    return tf.constant(arrays(step, shape or (20, 12))[hvd.rank()])


def means(steps: int, shape: tuple[int, ...] = (20, 12)) -> list[Arr]:
    """What the simulator gives."""
    world = LocalWorld(SPEC, hvd.size())
    return [world.step(arrays(step, shape))[0] for step in range(steps)]


def test_state_is_kept_by_name_in_and_out_of_a_graph() -> None:
    """The same name goes on, another one and another shape begin anew."""
    compression = Compression.parse(SPEC)

    def reduced(x: Any, name: str = "x") -> Any:
        return hvd.allreduce(x, name=name, compression=compression)

    graph = tf.function(reduced)
    results = [reduced(mine(0)), graph(mine(1)), graph(mine(2)), reduced(mine(3))]
    for result, mean in zip(results, means(4), strict=True):
        np.testing.assert_allclose(result, mean, rtol=1e-6)
    np.testing.assert_allclose(reduced(mine(0), "y"), means(1)[0], rtol=1e-6)
    np.testing.assert_allclose(reduced(mine(0, 40, 6)), means(1, (40, 6))[0], rtol=1e-6)
    assert compression.stats().steps == 6 and len(compression.sessions) == 3


def test_factors_and_variables() -> None:
    """A tensor may be anything that Horovod takes; the same one twice is two steps."""
    compression = Compression.parse(SPEC)
    options = {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 3.0, "compression": compression}
    tensor = tf.Variable(mine(0))
    first, second = (hvd.allreduce(tensor, name="scaled", **options) for _ in range(2))
    world = LocalWorld(SPEC, hvd.size())
    for result in (first, second):
        np.testing.assert_allclose(result, world.step(arrays(0))[0] * hvd.size() * 1.5, rtol=1e-5)


def test_groups() -> None:
    """Dense tensors are compressed together, IndexedSlices travel as Horovod has it."""
    compression = Compression.parse(SPEC)
    world = LocalWorld(SPEC, hvd.size())

    @tf.function  # type: ignore[untyped-decorator]
    def step(a: Any, b: Any) -> Any:
        slices = tf.IndexedSlices(tf.identity(tf.ones((1, 4))), tf.identity([hvd.rank()]), tf.constant([5, 4]))
        return hvd.grouped_allreduce([slices, a, b], name="group", op=hvd.Average, compression=compression)

    for number in range(2):
        sparse, a, b = step(mine(number), mine(number, 30, 5))
        expected = world.step({"group.1": arrays(number), "group.2": arrays(number, (30, 5))})
        np.testing.assert_allclose(a, expected["group.1"][0], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(b, expected["group.2"][0], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(sparse.values, tf.ones((hvd.size(), 4)) / hvd.size())


def test_the_same_list_again() -> None:
    compression = Compression.parse(SPEC)
    tensors = [mine(0), mine(0, 30, 5)]
    world = LocalWorld(SPEC, hvd.size())
    for _ in range(2):
        results = hvd.grouped_allreduce(tensors, name="again", op=hvd.Average, compression=compression)
        expected = world.step({"again.0": arrays(0), "again.1": arrays(0, (30, 5))})
        for i, result in enumerate(results):
            np.testing.assert_allclose(result, expected[f"again.{i}"][0], rtol=1e-5, atol=1e-7)


def test_process_sets() -> None:
    process_set = EVEN if hvd.rank() % 2 == 0 else ODD
    compression = Compression.parse(SPEC)
    result = hvd.allreduce(mine(0), name="apart", process_set=process_set, compression=compression)
    if process_set.size() == 1:
        np.testing.assert_array_equal(result, mine(0))
    assert_ranks_equal(result.numpy(), process_set)
    assert len(compression.sessions) == (process_set.size() > 1)


def test_a_bad_tensor_leaves_no_trace() -> None:
    compression = Compression.parse(SPEC)
    bad = mine(0) * (np.nan if hvd.rank() == 1 else 1.0)
    assert not np.isfinite(hvd.allreduce(bad, name="bad", compression=compression)).any()
    for step, mean in enumerate(means(2)):
        np.testing.assert_allclose(hvd.allreduce(mine(step), name="bad", compression=compression), mean, rtol=1e-6)


def test_names_without_end_and_compressors_made_in_each_step_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In eager mode; of names without end, the oldest are dropped."""
    monkeypatch.setattr(direct_calls, "MOST", 3)
    monkeypatch.setattr(direct_calls, "MANY", 2)
    monkeypatch.setattr(direct_calls, "RENEWED", 3)
    compression = Compression.parse(SPEC)
    for step in range(4):
        hvd.allreduce(mine(step), name=f"step{step}", compression=compression)
        hvd.allreduce(mine(step), name="again", compression=compression)
    assert len(compression.sessions) == 3
    variable = tf.Variable(mine(0))
    for step in range(4):
        hvd.allreduce(mine(step), name="new", compression=Compression.parse(SPEC))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * mine(step))
        hvd.DistributedGradientTape(tape, compression=Compression.parse(SPEC)).gradient(loss, [variable])
    first = hvd.rank() == 0
    assert caplog.text.count("one name per tensor") == first
    assert caplog.text.count("make the object once") == 2 * first
