"""The callback that averages models every few steps of ``fit``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from parallel.keras.training import LOSS, SIZE, Arr, assert_ranks_equal, make_model, weights

from hvd_compress.errors import DisagreementError, SpecError, StateError, UnsupportedError
from hvd_compress.keras import LocalSteps, Outer

NESTEROV = Outer(lr=0.7, momentum=0.9, nesterov=True)


def batches(steps: range, rank: int) -> tuple[Arr, Arr]:
    x = np.concatenate([np.random.default_rng([rank, step]).standard_normal((16, 32)) for step in steps])
    return x.astype(np.float32), x[:, :10].argmax(1)


def fit(model: Any, steps: range, rank: int, *callbacks: Any, **options: Any) -> None:
    if not model.optimizer:
        model.compile(optimizer=tf.keras.optimizers.legacy.SGD(0.1), loss=LOSS)
    model.fit(*batches(steps, rank), batch_size=16, shuffle=False, verbose=0, callbacks=list(callbacks), **options)


def alone(every: int, steps: int) -> Arr:
    """Nesterov's momentum over the means of all ranks, in one process."""
    models = [make_model() for _ in range(SIZE)]
    anchor = [np.array(v) for v in models[0].trainable_variables]
    momenta = [np.zeros_like(a) for a in anchor]
    for begin in range(0, steps, every):
        for rank, model in enumerate(models):
            fit(model, range(begin, begin + every), rank)
        for i, momentum in enumerate(momenta):
            mean = np.mean([anchor[i] - np.array(model.trainable_variables[i]) for model in models], axis=0)
            momentum[...] = NESTEROV.momentum * momentum + mean
            anchor[i] = anchor[i] - NESTEROV.lr * (mean + NESTEROV.momentum * momentum)
            for model in models:
                model.trainable_variables[i].assign(anchor[i])
    return weights(models[0])


@pytest.mark.parametrize("spec", ["none", "topk:ratio=1.0"])
def test_three_rounds_are_those_of_one_process(spec: str) -> None:
    model, local = make_model(), LocalSteps("diloco", every=3, outer=NESTEROV, compression=spec)
    fit(model, range(9), hvd.rank(), local)
    assert_ranks_equal(weights(model))
    np.testing.assert_allclose(weights(model), alone(3, 9), rtol=1e-4, atol=1e-5)
    assert local.stats().steps == 3, "at the end, nothing is left to be averaged"


def test_validation_sees_the_global_model() -> None:
    model, local, seen = make_model(), LocalSteps(every=4), list[Arr]()
    look = tf.keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(weights(model)))
    during = tf.keras.callbacks.Callback()
    during.on_test_batch_end = lambda *_: seen.append(weights(model))
    fit(model, range(6), hvd.rank(), local, look, during, validation_data=batches(range(1), 0))
    assert_ranks_equal(seen[0])
    assert not np.array_equal(seen[0], seen[1]), "then it goes on with its own"
    assert_ranks_equal(weights(model))


def test_it_goes_on_from_a_save(tmp_path: Path) -> None:
    folder = hvd.broadcast_object(str(tmp_path))
    options: dict[str, Any] = {"every": 4, "compression": "topk:ratio=0.1,min_size=0", "outer": NESTEROV}
    model, local = make_model(), LocalSteps(**options)
    fit(model, range(6), hvd.rank(), local)
    local.save(folder)
    kept = weights(model)
    fit(model, range(6, 12), hvd.rank(), local)
    other, again = make_model(), LocalSteps(**options)
    fit(other, range(6), hvd.rank(), LocalSteps(**options))
    np.testing.assert_array_equal(weights(other), kept)
    again.load(folder)
    fit(other, range(6, 12), hvd.rank(), again)
    np.testing.assert_array_equal(weights(other), weights(model))


def test_several_steps_at_a_time_are_refused() -> None:
    model = make_model()
    model.compile(optimizer=tf.keras.optimizers.legacy.SGD(0.1), loss=LOSS, steps_per_execution=2)
    with pytest.raises(UnsupportedError, match="steps_per_execution"):
        fit(model, range(4), hvd.rank(), LocalSteps(every=2))


def test_wrong_settings() -> None:
    with pytest.raises(SpecError, match="needs every="):
        LocalSteps()
    with pytest.raises(SpecError, match=r"hvd_compress\.keras"):
        LocalSteps(every=2, compression=hvd.Compression.fp16)
    with pytest.raises(StateError, match="once fit has begun"):
        LocalSteps(every=2).save("nowhere")
    with pytest.raises(DisagreementError, match=r"rank 1 has .*every=3"):
        fit(make_model(), range(2), hvd.rank(), LocalSteps(every=2 + (hvd.rank() > 0)))
