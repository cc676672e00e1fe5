"""What cannot work on Keras 3 says so, with the cure."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from keras3.training import LOSS, fit, go_on, keras, make_model, sgd

from hvd_compress.errors import UnsupportedError
from hvd_compress.keras import Compression, DistributedOptimizer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": hvd.Adasum}, "use hvd.Average or hvd.Sum"),
        (
            {"backward_passes_per_step": 2},
            "is not supported on Keras 3: .* gradient_accumulation_steps",
        ),
        ({"num_groups": 2}, "use groups"),
        ({"name": "mine"}, "name='mine' .* give the name to the Keras optimizer"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        DistributedOptimizer(sgd(), **options)


def test_options_that_horovod_refuses() -> None:
    with pytest.raises(ValueError, match="gradient_predivide_factor not supported with op != Average"):
        DistributedOptimizer(sgd(), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(TypeError, match="no_such_option"):
        DistributedOptimizer(sgd(), no_such_option=1)


def test_twice() -> None:
    with pytest.raises(UnsupportedError, match="is distributed already"):
        DistributedOptimizer(DistributedOptimizer(sgd()))


@pytest.mark.parametrize(("policy", "eager"), [("float32", False), ("mixed_float16", True)])
def test_a_loss_scale_outside(policy: str, eager: bool) -> None:
    """Put there by hand, and by Keras."""
    optimizer = DistributedOptimizer(sgd())
    keras.config.set_dtype_policy(policy)
    try:
        model = make_model()
    finally:
        keras.config.set_dtype_policy("float32")
    if policy == "float32":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, LOSS, run_eagerly=eager)
    with pytest.raises(UnsupportedError, match=r"use DistributedOptimizer\(LossScaleOptimizer\(optimizer\)"):
        go_on(model, 1)


def test_a_model_for_xla() -> None:
    model = make_model()
    model.compile(DistributedOptimizer(sgd()), LOSS, jit_compile=True)
    with pytest.raises(UnsupportedError, match=r"use model.compile\(..., jit_compile=False\)"):
        go_on(model, 1)


def test_a_function_for_xla() -> None:
    model, optimizer = make_model(), DistributedOptimizer(sgd())
    optimizer.build(model.trainable_variables)
    step = tf.function(lambda: optimizer.apply([tf.ones(v.shape) for v in model.trainable_variables]), jit_compile=True)
    with pytest.raises(UnsupportedError, match="cannot compile Horovod's operations"):
        step()


@pytest.mark.parametrize("scaled", [False, True])
def test_momentum_twice(scaled: bool) -> None:
    """Of the optimizer, on top of the method's."""
    optimizer = keras.optimizers.LossScaleOptimizer(sgd()) if scaled else sgd()
    with pytest.raises(UnsupportedError, match=r"has a momentum of 0.9, which is not supported with dgc"):
        fit(Compression.dgc(), 1, optimizer)


def test_other_compression_on_one_rank() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"the method: rank 0 has 'topk', rank 1 has"):
        fit(["topk:ratio=0.01", "topk:ratio=0.02"][hvd.rank()], 1)


def test_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keras.backend.backend", lambda: "jax")
    with pytest.raises(UnsupportedError, match=r"Keras runs on 'jax', .* KERAS_BACKEND=tensorflow before"):
        DistributedOptimizer(sgd())
