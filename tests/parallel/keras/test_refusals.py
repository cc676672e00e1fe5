"""What cannot work says so, on all ranks, in the same words, and at once."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf
from parallel.keras.training import EVEN, LOSS, ODD, Tape, batches, everyone, small_model

from hvd_compress.core.collectives import AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter
from hvd_compress.errors import (
    CompressionError,
    DisagreementError,
    GradientError,
    SpecError,
    UnknownParameterError,
    UnsupportedError,
)
from hvd_compress.keras import DistributedOptimizer
from hvd_compress.tensorflow import Compression
from hvd_compress.tensorflow.transport import EagerTransport
from hvd_compress.transport.lockstep import perform


def refused(job: Tape, kind: type[CompressionError]) -> str:
    """The message of the error that the first step of a job ends in; the same on all ranks."""
    with pytest.raises((kind, tf.errors.InvalidArgumentError)) as error:
        job.run(1)
    said = str(error.value).rpartition("Traceback")[0] or str(error.value)  # of a call by a graph
    message, *others = everyone(said.rpartition(f"{kind.__name__}: ")[2].strip())  # after AutoGraph's stack
    assert others == [message] * (hvd.size() - 1)
    return str(message)


def test_compressors_are_horovods() -> None:
    for compression in (Compression.none, Compression.fp16, Compression.topk(), Compression.parse("int8")):
        assert isinstance(compression, hvd.compression.Compressor)
        hash(compression)


@pytest.mark.parametrize(
    ("usual", "other"),
    [("topk", "topk:ratio=0.02"), ("topk", "none"), ("none", "topk")],
)
def test_other_compression_on_one_rank(usual: str, other: str) -> None:
    """Of another method, kept state or not, or of other hyper-parameters."""
    message = refused(Tape([usual, other][hvd.rank() == 1], model=small_model()), DisagreementError)
    assert f"the method: rank 0 has {usual!r}, rank 1 has {other!r}" in message


def other_variables(change: str) -> Any:
    """Variables that differ on one rank: one more, another shape, another dtype, another order."""
    shapes: list[tuple[int, ...]] = [(32, 40), (16, 10)]
    kind = tf.float32
    if hvd.rank() == 1:
        shapes += [(3,)] if change == "more" else []
        shapes[1] = (16, 12) if change == "shape" else shapes[1]
        shapes = shapes[::-1] if change == "order" else shapes
        kind = tf.float64 if change == "dtype" else kind
    variables = [tf.Variable(tf.ones(shape, kind), name=f"v{shape[0]}") for shape in shapes]
    return SimpleNamespace(trainable_variables=variables)


@pytest.mark.parametrize(
    ("spec", "change"), [("topk", "more"), ("topk", "order"), ("none", "shape"), ("none", "dtype")]
)
def test_other_variables_on_one_rank(spec: str, change: str) -> None:
    def loss(model: Any, x: Any, y: Any) -> Any:
        return tf.add_n([tf.cast(tf.reduce_sum(v * v), tf.float32) for v in model.trainable_variables])

    message = refused(Tape(spec, model=other_variables(change), loss=loss), DisagreementError)
    assert "the parameters: rank 0 has" in message


SGDS = [tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD]
ADAMS = [tf.keras.optimizers.AdamW, tf.keras.optimizers.legacy.Adam]


@pytest.mark.parametrize(
    ("make", "spec"),
    [
        *((functools.partial(kind, 0.1, momentum=0.9), "dgc") for kind in SGDS),
        *((functools.partial(kind, 0.1, momentum=0.9), "ctk:preconditioned=on") for kind in SGDS),
        *((functools.partial(kind, 0.1), "dgc") for kind in ADAMS),
    ],
)
def test_momentum_twice(make: Any, spec: str) -> None:
    """A momentum of the optimizer on top of the method's. (A tape does not know the optimizer, so there it passes.)"""
    model = small_model()
    optimizer = hvd_keras.DistributedOptimizer(make(), compression=Compression.parse(spec))
    model.compile(optimizer=optimizer, loss=LOSS)
    with pytest.raises(UnsupportedError, match=rf"has a momentum of 0.9, which is not supported with {spec}"):
        model.fit(*batches(1), batch_size=16, verbose=0)


@pytest.mark.parametrize("kind", ADAMS)
def test_adam_is_refused_where_updates_arrive(kind: Any) -> None:
    model = small_model()
    optimizer = hvd_keras.DistributedOptimizer(kind(0.1), compression=Compression.ctk(preconditioned=True))
    model.compile(optimizer=optimizer, loss=LOSS)
    with pytest.raises(UnsupportedError, match=rf"{kind.__name__} is not supported with ctk:preconditioned=on"):
        model.fit(*batches(1), batch_size=16, verbose=0)


@pytest.mark.parametrize(("kind", "beta"), [(tf.keras.optimizers.Adam, 0.93), (tf.keras.optimizers.legacy.Adam, 0.94)])
def test_adam_beside_a_residual_is_warned_of(kind: Any, beta: float, caplog: pytest.LogCaptureFixture) -> None:
    for one in (0.0, beta):
        model = small_model()
        optimizer = hvd_keras.DistributedOptimizer(kind(beta_1=one), compression=Compression.topk(ratio=0.1))
        model.compile(optimizer=optimizer, loss=LOSS)
        model.fit(*batches(1), batch_size=16, verbose=0)
    assert caplog.text.count("first beta") == caplog.text.count(f"first beta is {beta:g}") == (hvd.rank() == 0)


def test_an_optimizer_need_not_tell_its_configuration() -> None:
    """Some cannot."""

    def get_config(self: Any) -> dict[str, Any]:
        raise NotImplementedError

    model = small_model()
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), compression=Compression.topk())
    type(optimizer).get_config = get_config  # of the class that Horovod makes for this optimizer alone
    model.compile(optimizer=optimizer, loss=LOSS)
    model.fit(*batches(1), batch_size=16, verbose=0)


def test_horovods_refusals_are_kept() -> None:
    with pytest.raises(ValueError, match="op currently only supports Average and Sum"):
        DistributedOptimizer(tf.keras.optimizers.SGD(0.1), op=-1)


def test_adasum() -> None:
    message = refused(Tape("topk", model=small_model(), op=hvd.Adasum), UnsupportedError)
    assert "op=hvd.Adasum is not supported with this compression" in message and "use op=hvd.Average" in message


def test_direct_calls_need_a_name() -> None:
    def allreduce_grads(grads: list[Any]) -> list[Any]:
        """A user's function may have the name of Horovod's."""
        return [hvd.allreduce(grad, compression=Compression.topk()) for grad in grads]

    with pytest.raises(UnknownParameterError, match=r"give it one, as in hvd\.allreduce\(tensor, name="):
        allreduce_grads([tf.ones(3)])
    with pytest.raises(UnknownParameterError, match="give it one"):
        hvd.grouped_allreduce([tf.ones(3)], compression=Compression.topk())
    with pytest.raises(UnknownParameterError, match=r"outside of hvd\.DistributedOptimizer"):
        hvd.reducescatter(tf.ones(4), compression=Compression.topk())


@pytest.mark.parametrize("op", ["Adasum", "Max"])
def test_direct_calls_only_sum(op: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"op=hvd\.{op} is not supported with this compression"):
        hvd.allreduce(tf.ones(3), name="not.summed", op=getattr(hvd, op), compression=Compression.topk())


def test_direct_calls_know_the_shape() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None])], autograph=False)  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        return hvd.allreduce(x, name="shapeless", compression=Compression.topk())

    with pytest.raises(GradientError, match=r"'shapeless' has shape \(None,\)"):
        step(tf.ones(3))
    with pytest.raises(GradientError, match="the gradient of 'whole' has dtype int32"):
        hvd.allreduce(tf.ones(3, tf.int32), name="whole", compression=Compression.topk())


def test_the_choice_by_step_times_needs_training_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    compression = Compression.auto()
    with pytest.raises(UnsupportedError, match=r"auto is not supported in direct calls of hvd\.allreduce"):
        hvd.allreduce(tf.ones(3), name="auto.x", compression=compression)
    with pytest.raises(UnsupportedError, match=r"auto is not supported in direct calls of hvd\.allreduce"):
        hvd.grouped_allreduce([tf.ones(3)], name="auto.y", compression=compression)
    with pytest.raises(UnsupportedError, match="auto is not supported with merge='search'"):
        Compression.auto(merge="search")
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    message = refused(Tape("auto", model=small_model()), UnsupportedError)
    assert "auto is not supported in an elastic job" in message


def test_elastic_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(UnsupportedError, match=r"direct calls of hvd\.allreduce") as error:
        hvd.allreduce(tf.ones(3), name="elastic.x", compression=Compression.topk())
    assert everyone(str(error.value)) == [str(error.value)] * hvd.size()
    job = Tape("topk", model=small_model(), process_set=EVEN if hvd.rank() % 2 == 0 else ODD)
    assert "process sets are not supported with this compression in an elastic job" in refused(job, UnsupportedError)


def test_complex_gradients() -> None:
    model = SimpleNamespace(trainable_variables=[tf.Variable(tf.ones((40, 40), tf.complex64))])
    job = Tape("topk", model=model, loss=lambda m, x, y: tf.reduce_sum(tf.abs(m.trainable_variables[0])))
    with pytest.raises(GradientError, match="has dtype complex64, which cannot be compressed; allowed: float16"):
        job.gradients(0)


def test_a_factory_that_was_not_called() -> None:
    with pytest.raises(SpecError, match=r"the parentheses are missing: pass Compression.topk\(\)"):
        Tape(Compression.topk).run(1)


MESSAGES: dict[str, Any] = {
    **{f"sum {d}": (lambda a: AllReduce(a), d) for d in ("float16", "float32", "float64", "int32", "int64")},
    **{f"max {d}": (lambda a: AllReduce(a, "max"), d) for d in ("float32", "float64")},
    "gather": (lambda a: AllGather(a.reshape(-1)), "uint8"),
    "sum of a row": (lambda a: ReduceScatter(a), "float32"),
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
    transport = EagerTransport.of(hvd.global_process_set)
    reply = transport.start(make(array_of(hvd.rank())), f"test.{name.replace(' ', '.')}").result()
    np.testing.assert_array_equal(reply, expected)
