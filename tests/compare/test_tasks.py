"""The tasks: found by name, alike on all ranks, and able to learn."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch
from compare.files import TRAIN, write_images, write_text

from hvd_compress.errors import SpecError
from hvd_compress.lab import Setting, Training
from hvd_compress.tools.compare.tasks import find

pytestmark = pytest.mark.tensorflow

SIZES = [1, 2, 3]
ALL = [("torch", "digits"), ("keras", "digits"), ("torch", "fashion"), ("keras", "fashion"), ("torch", "lm")]
each_task = pytest.mark.parametrize(("framework", "name"), ALL)


@pytest.fixture(scope="module", name="places")
def _places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Settings with data for each task."""
    images = write_images(tmp_path_factory.mktemp("images"))
    text = write_text(tmp_path_factory.mktemp("text") / "text")
    small = {"vocabulary": "30", "hidden": "16", "batch": "6", "test": "700"}
    return {
        "digits": {},
        "fashion": {"data": str(images), "options": {"batch": "24", "test": "40"}},
        "lm": {"data": str(text), "options": small},
    }


Build = Callable[..., Training]


@pytest.fixture(name="build")
def _build(places: dict[str, dict[str, Any]], framework: str, name: str) -> Build:
    """Makes a training of the task as a worker does."""

    def build(seed: int = 0, **changes: Any) -> Training:
        torch.manual_seed(seed)
        tf.keras.utils.set_random_seed(seed)
        return find(name, framework)(Setting(seed=seed, **{**places[name], **changes}))

    return build


def arrays(batch: Any) -> list[Any]:
    return [np.asarray(part) for part in batch]


def weights(model: Any) -> list[Any]:
    if isinstance(model, torch.nn.Module):
        return [parameter.detach().numpy().copy() for parameter in model.parameters()]
    return [variable.numpy() for variable in model.trainable_variables]


def step(training: Training, batch: Any) -> float:
    """What a worker does on one rank; the loss before."""
    if isinstance(training.model, torch.nn.Module):
        training.optimizer.zero_grad()
        loss = training.loss(training.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), training.clip or math.inf)
        training.optimizer.step()
    else:
        variables = training.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = training.loss(training.model, batch)
        training.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)


def mean(training: Training) -> float:
    """What a rank says of its share."""
    if not isinstance(training.model, torch.nn.Module):
        return training.evaluate(training.model)
    training.model.eval()
    with torch.no_grad():
        found = training.evaluate(training.model)
    training.model.train()
    return found


def metric(training: Training) -> float:
    return training.finish(mean(training))


@each_task
@pytest.mark.parametrize("size", SIZES)
def test_every_rank_has_as_many_minibatches(build: Build, name: str, size: int) -> None:
    ranks = [[arrays(b) for b in build(rank=rank, size=size).batches(0)] for rank in range(size)]
    assert len({len(rank) for rank in ranks}) == 1 and len(ranks[0]) > 1
    per_rank = {"digits": 32, "fashion": 24 // size, "lm": 6 // size}[name]
    assert {len(part) for rank in ranks for batch in rank for part in batch[:2]} == {per_rank}


@each_task
@pytest.mark.parametrize("size", SIZES)
def test_minibatches_of_the_ranks_are_apart_and_cover_the_data(build: Build, name: str, size: int) -> None:
    found: list[bytes] = []
    for rank in range(size):
        for inputs, *_ in map(arrays, build(rank=rank, size=size).batches(1)):
            found += [row.tobytes() for row in inputs]
    if name == "lm":  # no sequence of 35 words comes twice
        assert len(set(found)) == len(found) > 0.9 * 24_000 * 0.95 / 35
    else:
        whole, step_size = {"digits": (1408, 32 * size), "fashion": (TRAIN, 24)}[name]
        assert len(found) == whole // step_size * step_size
        assert len(set(found)) > 0.99 * len(found)  # two of the digits are alike


@each_task
def test_the_order_is_of_the_seed_and_the_epoch(build: Build) -> None:
    def first(seed: int, epoch: int) -> bytes:
        inputs, *_ = arrays(next(iter(build(seed).batches(epoch))))
        return bytes(inputs.tobytes())

    assert first(0, 0) == first(0, 0)
    assert len({first(seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)}) == 6


@each_task
def test_minibatches_leave_the_global_generators_alone(build: Build) -> None:
    training = build()
    before = torch.get_rng_state(), np.random.get_state(legacy=False), tf.random.get_global_generator().state.numpy()
    list(training.batches(0))
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_equal(np.random.get_state(legacy=False), before[1])
    np.testing.assert_array_equal(tf.random.get_global_generator().state.numpy(), before[2])


@each_task
def test_the_weights_are_of_the_seed_on_every_rank(build: Build) -> None:
    first, rank, other = weights(build().model), weights(build(rank=1, size=2).model), weights(build(seed=1).model)
    for a, b in zip(first, rank, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@each_task
def test_some_steps_lower_the_loss_and_better_the_metric(build: Build, name: str) -> None:
    training = build(lr=5 if name == "lm" else None)
    before = metric(training)
    batches = (batch for epoch in range(20) for batch in training.batches(epoch))
    losses = [step(training, batch) for batch in islice(batches, 100 if name == "lm" else 40)]
    assert np.mean(losses[-5:]) < 0.75 * np.mean(losses[:5])
    assert metric(training) < before / 3 if name == "lm" else metric(training) > before + 0.3


@each_task
def test_the_metric_of_ranks_is_that_of_equal_shares(build: Build, name: str) -> None:
    means = [mean(build(rank=rank, size=2)) for rank in range(2)]
    assert means[0] != means[1]
    odd_one_out = 1 / 389 if name == "digits" else 1e-6
    assert np.mean(means) == pytest.approx(mean(build()), abs=odd_one_out)


@each_task
@pytest.mark.parametrize("momentum", [True, False])
def test_momentum_is_only_used_where_it_may_be(build: Build, name: str, momentum: bool) -> None:
    optimizer = build(momentum=momentum, lr=0.25).optimizer
    own = {"digits": 0.8, "fashion": 0.9, "lm": 0.0}[name]
    if isinstance(optimizer, torch.optim.SGD):
        found = optimizer.defaults["momentum"], optimizer.defaults["lr"]
    else:
        config = optimizer.get_config()
        found = config["momentum"], config["learning_rate"]
    assert found == (own if momentum else 0, 0.25)


@each_task
def test_what_cannot_be_is_refused(build: Build, name: str) -> None:
    with pytest.raises(SpecError, match=f"unknown option 'test_' of the task '{name}'"):
        build(options={"test_": "3"})
    if name != "digits":
        with pytest.raises(SpecError, match=r"batch='many' is not allowed: batch must be a whole number"):
            build(options={"batch": "many"})
        with pytest.raises(SpecError, match="test=0 is not allowed: test must be at least 1"):
            build(options={"test": "0"})
        with pytest.raises(SpecError, match="batch=3 is not allowed: batch must be at least 4, one for each rank"):
            build(options={"batch": "3"}, size=4)


@pytest.mark.parametrize("name", ["digits", "fashion"])
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_too_few_images_for_so_many_ranks(places: dict[str, dict[str, Any]], framework: str, name: str) -> None:
    given = {**places[name], "options": {} if name == "digits" else {"batch": "400", "test": "40"}}
    with pytest.raises(SpecError, match=r"images to train on are too few for 45 ranks"):
        find(name, framework)(Setting(size=45, **given))
    if name == "fashion":
        with pytest.raises(SpecError, match="40 test images cannot be dealt out to 45 ranks"):
            find(name, framework)(Setting(size=45, data=given["data"], options={"batch": "45", "test": "40"}))


@pytest.mark.parametrize("name", ["digits", "fashion"])
def test_both_frameworks_train_the_same(places: dict[str, dict[str, Any]], name: str) -> None:
    made = [find(name, framework)(Setting(**places[name])) for framework in ("torch", "keras")]
    sizes = [sum(w.size for w in weights(training.model)) for training in made]
    assert sizes == [{"digits": 151_306, "fashion": 3_241_354}[name]] * 2
    batches = [arrays(next(iter(training.batches(0)))) for training in made]
    np.testing.assert_array_equal(batches[0][0].squeeze(1), batches[1][0].squeeze(3))
    np.testing.assert_array_equal(batches[0][1], batches[1][1])
    facts = [(t.target, t.epochs, t.every, t.clip, t.metric, t.higher_is_better) for t in made]
    assert facts[0] == facts[1]
