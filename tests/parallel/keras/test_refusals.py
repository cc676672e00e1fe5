"""What cannot work says so, on all ranks, in the same words, and at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf
from parallel.keras.training import LOSS, Tape, batches, everyone, make_model

from hvd_compress.collectives import AllGather, AllReduce, AllToAll, Broadcast
from hvd_compress.errors import (
    CompressionError,
    DisagreementError,
    GradientError,
    SpecError,
    UnknownParameterError,
    UnsupportedError,
)
from hvd_compress.group import Group
from hvd_compress.local import perform
from hvd_compress.tensorflow import Compression, driver


def refused(job: Tape, kind: type[CompressionError]) -> str:
    """The message of the error that the first step of a job ends in; the same on all ranks."""
    with pytest.raises(kind) as error:
        job.run(1)
    message, *others = everyone(str(error.value).rpartition(f"{kind.__name__}: ")[2])  # after AutoGraph's stack
    assert others == [message] * (hvd.size() - 1)
    return str(message)


def test_compressors_are_horovods() -> None:
    for compression in (Compression.none, Compression.fp16, Compression.topk(), Compression.parse("int8")):
        assert isinstance(compression, hvd.compression.Compressor)
        hash(compression)


def test_other_compression_on_one_rank() -> None:
    message = refused(Tape(["topk:ratio=0.01", "topk:ratio=0.02"][hvd.rank() == 1]), DisagreementError)
    assert "the method: rank 0 has 'topk', rank 1 has 'topk:ratio=0.02'" in message


def test_other_shape_on_one_rank() -> None:
    model = make_model()
    if hvd.rank() == 1:
        model = tf.keras.Sequential([tf.keras.layers.Dense(48, input_shape=(32,)), tf.keras.layers.Dense(10)])
    assert "the parameters: rank 0 has" in refused(Tape("topk", model=model), DisagreementError)


def test_training_goes_on_after_a_refusal() -> None:
    refused(Tape(["topk", "int8"][hvd.rank() == 1]), DisagreementError)
    Tape("topk").run(2)


@pytest.mark.parametrize("kind", [tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD])
def test_momentum_twice(kind: Any) -> None:
    """A momentum of the optimizer on top of the method's. (A tape does not know the optimizer, so there it passes.)"""
    model = make_model()
    optimizer = hvd_keras.DistributedOptimizer(kind(0.1, momentum=0.9), compression=Compression.dgc())
    model.compile(optimizer=optimizer, loss=LOSS)
    with pytest.raises(UnsupportedError, match=r"has a momentum of 0.9, which does not go with dgc"):
        model.fit(*batches(1), batch_size=16, verbose=0)


def test_an_optimizer_is_asked_only_where_it_matters() -> None:
    """Some cannot tell their configuration."""

    def get_config(self: Any) -> dict[str, Any]:
        raise NotImplementedError

    model = make_model()
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=Compression.topk())
    type(optimizer).get_config = get_config  # of the class that Horovod makes for this optimizer alone
    model.compile(optimizer=optimizer, loss=LOSS)
    model.fit(*batches(1), batch_size=16, verbose=0)


def test_adasum() -> None:
    message = refused(Tape("topk", op=hvd.Adasum), UnsupportedError)
    assert "op=hvd.Adasum does not go with this compression" in message and "use op=hvd.Average" in message


def test_direct_calls_need_a_method_without_state() -> None:
    def allreduce_grads(grads: list[Any]) -> list[Any]:
        """A user's function may have the name of Horovod's."""
        return [hvd.allreduce(grad, compression=Compression.topk()) for grad in grads]

    with pytest.raises(UnknownParameterError, match=r"outside of hvd\.DistributedOptimizer"):
        allreduce_grads([tf.ones(3)])


def test_complex_gradients() -> None:
    model = SimpleNamespace(trainable_variables=[tf.Variable(tf.ones((40, 40), tf.complex64))])
    job = Tape("topk", model=model, loss=lambda m, x, y: tf.reduce_sum(tf.abs(m.trainable_variables[0])))
    with pytest.raises(GradientError, match="has dtype complex64, which cannot be compressed; allowed: float16"):
        job.gradients(0)


def test_a_factory_that_was_not_called() -> None:
    with pytest.raises(SpecError, match=r"pass compression=Compression.topk\(\)"):
        Tape(Compression.topk).run(1)


MESSAGES: dict[str, Any] = {
    **{f"sum {d}": (lambda a: AllReduce(a), d) for d in ("float16", "float32", "float64", "int32", "int64")},
    **{f"max {d}": (lambda a: AllReduce(a, "max"), d) for d in ("float32", "float64")},
    "gather": (lambda a: AllGather(a.reshape(-1) if isinstance(a, np.ndarray) else tf.reshape(a, [-1])), "uint8"),
    "ragged gather": (lambda a: AllGather(a[0, :2] if a[0, 1] % 2 else a[0], ragged=True), "uint8"),
    "all to all": (lambda a: AllToAll(a), "uint8"),
    **{f"broadcast {root}": (lambda a, root=root: Broadcast(a, root), "float32") for root in range(2)},
}


@pytest.mark.parametrize("name", MESSAGES)
def test_collectives_do_what_the_simulator_does(name: str) -> None:
    make, dtype = MESSAGES[name]

    def array_of(rank: int) -> Any:
        return (np.arange(hvd.size() * 3).reshape(hvd.size(), 3) * (rank + 1) % 50).astype(dtype)

    expected = perform([make(array_of(rank)) for rank in range(hvd.size())], hvd.size())[hvd.rank()]
    group = Group.of(hvd.global_process_set)
    reply = driver.perform(make(tf.constant(array_of(hvd.rank()))), f"test.{name.replace(' ', '.')}", group)
    np.testing.assert_array_equal(reply, expected)
