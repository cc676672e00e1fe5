"""The language models: what they are asked, what they know, and what they remember."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from compare.files import write_text

from hvd_compress.errors import SpecError
from hvd_compress.lab import Setting, Training
from hvd_compress.tools.compare.tasks.torch_lm import LanguageModel
from hvd_compress.tools.compare.tasks.torch_lm import lm as build
from hvd_compress.tools.compare.tasks.torch_transformer import transformer, warm_up_and_cosine

VOCABULARY = 30


@pytest.fixture(name="lm")
def _lm(tmp_path: Path) -> Training:
    torch.manual_seed(0)
    options = {"vocabulary": str(VOCABULARY), "hidden": "16", "batch": "6", "test": "700"}
    return build(Setting(data=str(write_text(tmp_path / "text")), options=options))


def test_an_untrained_language_model_knows_nothing(lm: Training) -> None:
    with torch.no_grad():
        assert lm.finish(lm.evaluate(lm.model)) == pytest.approx(VOCABULARY, rel=0.05)
    assert lm.finish is math.exp
    assert (lm.metric, lm.higher_is_better) == ("perplexity", False)


def test_the_embedding_is_the_output_layer() -> None:
    model = LanguageModel(50, 8, 0.0)
    shapes = sorted(tuple(parameter.shape) for parameter in model.parameters())
    assert shapes.count((50, 8)) == 1 and (8, 50) not in shapes
    words = torch.tensor([[1, 2, 3]])
    before, _ = model(words, None)
    with torch.no_grad():
        model.embedding.weight[40] += 1  # a word that is not among the inputs
    after, _ = model(words, None)
    changed = (before != after).any(dim=1)[0]
    assert changed.nonzero().flatten().tolist() == [40]


def test_each_word_is_to_be_guessed_from_those_before(lm: Training) -> None:
    batches: Iterator[Any] = iter(lm.batches(0))
    first, second = next(batches), next(batches)
    assert (first.first, second.first) == (True, False)
    assert first.inputs.shape == first.targets.shape == (6, 35)
    torch.testing.assert_close(first.inputs[:, 1:], first.targets[:, :-1])
    torch.testing.assert_close(first.targets[:, -1], second.inputs[:, 0])


def test_gradients_always_flow_through_as_many_words(lm: Training) -> None:
    for epoch in range(3):
        assert {batch.inputs.shape for batch in lm.batches(epoch)} == {(6, 35)}


def test_the_state_goes_on_within_an_epoch_and_not_beyond(lm: Training) -> None:
    lm.model.eval()
    first, second = islice(iter(lm.batches(0)), 2)
    fresh = lm.loss(lm.model, second._replace(first=True)).item()
    lm.loss(lm.model, first)
    carried = lm.loss(lm.model, second)
    assert carried.item() != fresh
    assert lm.loss(lm.model, second._replace(first=True)).item() == fresh
    _, state = lm.model(first.inputs, None)
    whole = torch.nn.functional.cross_entropy(lm.model(second.inputs, state)[0].flatten(0, 1), second.targets.flatten())
    assert carried.item() == whole.item()
    carried.backward()  # the graph of the first minibatch is not there any more, and is not needed


def test_options_of_the_language_model() -> None:
    for name, value in {"hiden": "3", "vocabulary": "2", "dropout": "1", "words": "9999", "hidden": "0"}.items():
        with pytest.raises(SpecError):
            build(Setting(options={name: value}))


def test_the_transformer_guesses_each_byte_of_the_sources_from_those_before_alone() -> None:
    torch.manual_seed(0)
    training = transformer(Setting(options={"layers": "2", "width": "32", "steps": "2"}))
    inputs, targets = next(iter(training.batches(0)))
    assert inputs.shape == targets.shape == (32, 64)
    torch.testing.assert_close(inputs[:, 1:], targets[:, :-1])
    assert sum(bytes(row.tolist()).count(b"self") for row in inputs) > 0
    with torch.no_grad():
        assert training.evaluate(training.model) == pytest.approx(math.log(256), rel=0.05)
        before = training.model(inputs)
        changed = inputs.clone()
        changed[:, 40] = 255 - changed[:, 40]
        same = (training.model(changed) == before).all(dim=2)
    assert same[:, :40].all() and not same[:, 40:].any()


def test_a_text_of_bytes_is_any_file(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(256)) * 50)
    options = {"layers": "1", "width": "32", "batch": "4"}
    inputs, _ = next(iter(transformer(Setting(data=str(path), options=options)).batches(0)))
    assert all((row[1:] - row[:-1]).remainder(256).tolist().count(1) > 50 for row in inputs)
    path.write_bytes(b"short")
    for name, message in ((path, "has 5 bytes of text"), (tmp_path / "none", "there is no such file")):
        with pytest.raises(SpecError, match=message):
            transformer(Setting(data=str(name), options=options))


def test_the_learning_rate_of_the_transformer_rises_then_falls() -> None:
    rates = [warm_up_and_cosine(step / 100) for step in range(101)]
    assert rates[0] == 0 and rates[100] == 0 and max(rates) == rates[10] > 0.97
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)
