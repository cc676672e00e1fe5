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

WORDS = 12_000
ALL = [
    ("torch", "digits"),
    ("keras", "digits"),
    ("torch", "fashion"),
    ("keras", "fashion"),
    ("torch", "lm"),
    ("torch", "transformer"),
]
each_task = pytest.mark.parametrize(("framework", "name"), ALL)


@pytest.fixture(scope="module", name="places")
def _places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Settings with data for each task."""
    images = write_images(tmp_path_factory.mktemp("images"))
    text = write_text(tmp_path_factory.mktemp("text") / "text", lines=WORDS // 8)
    small = {"vocabulary": "30", "hidden": "16", "batch": "6", "test": "700"}
    layer = {"layers": "1", "width": "32", "batch": "6", "steps": "50", "test": str(65 * 40)}
    return {
        "digits": {},
        "fashion": {"data": str(images), "options": {"batch": "24", "test": "40"}},
        "lm": {"data": str(text), "options": small},
        "transformer": {"options": layer},
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
def test_minibatches_of_the_ranks_are_as_many_and_apart_and_cover_the_data(build: Build, name: str) -> None:
    for size in (1, 3):
        ranks = [[arrays(b) for b in build(rank=rank, size=size).batches(1)] for rank in range(size)]
        assert len({len(rank) for rank in ranks}) == 1 and len(ranks[0]) > 1
        per_rank = {"digits": 32, "fashion": 24 // size, "lm": 6 // size, "transformer": 6 // size}[name]
        assert {len(part) for rank in ranks for batch in rank for part in batch[:2]} == {per_rank}
        found = [row.tobytes() for rank in ranks for inputs, *_ in rank for row in inputs]
        if name == "lm":  # no sequence of 35 words comes twice
            assert len(set(found)) == len(found) > 0.9 * WORDS * 0.95 / 35
        elif name == "transformer":  # some windows are alike, of spaces or licences
            assert len(found) == 50 * 6 and len(set(found)) > 0.9 * len(found)
        else:
            whole, step_size = {"digits": (1408, 32 * size), "fashion": (TRAIN, 24)}[name]
            assert len(found) == whole // step_size * step_size
            assert len(set(found)) > 0.99 * len(found)  # two of the digits are alike


@each_task
def test_order_and_weights_are_of_the_seed_alone(build: Build) -> None:
    """And global generators are left as they are."""
    orders = {(seed, epoch): order(build(seed), epoch) for seed in (0, 1) for epoch in (0, 1, 2)}
    assert len(set(orders.values())) == 6
    training = build()
    assert order(training, 0) == orders[0, 0]
    before = torch.get_rng_state(), np.random.get_state(legacy=False), tf.random.get_global_generator().state.numpy()
    list(training.batches(0))
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_equal(np.random.get_state(legacy=False), before[1])
    np.testing.assert_array_equal(tf.random.get_global_generator().state.numpy(), before[2])
    first, rank, other = weights(training.model), weights(build(rank=1, size=2).model), weights(build(seed=1).model)
    for a, b in zip(first, rank, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def order(training: Training, epoch: int) -> bytes:
    """The first minibatch of an epoch."""
    inputs, *_ = arrays(next(iter(training.batches(epoch))))
    return bytes(inputs.tobytes())


@pytest.mark.long
@each_task
def test_some_steps_lower_the_loss_and_better_the_metric(build: Build, name: str) -> None:
    training = build(lr=5 if name == "lm" else None)
    before = metric(training)
    batches = (batch for epoch in range(20) for batch in training.batches(epoch))
    losses = [step(training, batch) for batch in islice(batches, 100 if name == "lm" else 40)]
    assert np.mean(losses[-5:]) < 0.75 * np.mean(losses[:5])
    after, most = metric(training), {"lm": before / 3, "transformer": 0.75 * before}
    assert after < most[name] if name in most else after > before + 0.3


@each_task
def test_the_metric_of_ranks_is_that_of_equal_shares(build: Build, name: str) -> None:
    means = [mean(build(rank=rank, size=2)) for rank in range(2)]
    assert means[0] != means[1]
    odd_one_out = 1 / 389 if name == "digits" else 1e-6
    assert np.mean(means) == pytest.approx(mean(build()), abs=odd_one_out)


@each_task
def test_momentum_is_only_used_where_it_may_be(build: Build, name: str) -> None:
    own = {"digits": 0.8, "fashion": 0.9, "lm": 0.0, "transformer": 0.9}[name]
    for momentum in (True, False):
        optimizer = build(momentum=momentum, lr=0.25).optimizer
        if isinstance(optimizer, torch.optim.SGD):
            found = optimizer.defaults["momentum"], optimizer.defaults["lr"]
        elif isinstance(optimizer, torch.optim.AdamW):
            found = optimizer.defaults["betas"][0], optimizer.defaults["lr"]
        else:
            config = optimizer.get_config()
            found = config["momentum"], config["learning_rate"]
        assert found == (own if momentum else 0, 0.25)


def test_what_cannot_be_is_refused(places: dict[str, dict[str, Any]]) -> None:
    given: list[tuple[str, dict[str, str], int]] = [
        *((name, {"test_": "3"}, 1) for name in places),
        *(("fashion", {name: value}, 4) for name, value in (("batch", "many"), ("test", "0"), ("batch", "3"))),
        *(("transformer", {k: v}, 2) for k, v in (("heads", "5"), ("beta1", "1"), ("decay", "-1"), ("test", "129"))),
        ("digits", {}, 45),  # too few images for so many ranks
        ("fashion", {"batch": "400", "test": "40"}, 45),
        ("fashion", {"batch": "45", "test": "40"}, 45),
    ]
    for name, options, size in given:
        with pytest.raises(SpecError):
            find(name, "torch")(Setting(size=size, **{**places[name], "options": options}))


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
