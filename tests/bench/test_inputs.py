"""The gradients to measure with: the same each time, and what their docstrings say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_compress.errors import SpecError
from hvd_compress.tools.bench.traffic import RMS
from methods_page.inputs import INPUTS, NEIGHBOURS, sample


@pytest.mark.parametrize("name", [name for name in INPUTS if name != "digits"])
def test_the_same_arguments_give_the_same_gradients(name: str) -> None:
    first, second = sample(name, 3000, 3), sample(name, 3000, 3)
    assert first.shapes == second.shapes and len(first.ranks) == 3
    for a, b in zip(first.ranks, second.ranks, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == np.float32 and np.isfinite(a).all() and a.any()
    assert not np.array_equal(first.ranks[0], first.ranks[1])


@pytest.mark.slow
def test_digits_are_the_gradients_of_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first minibatches, here; they neither depend on the global generator nor touch it."""
    monkeypatch.setattr("methods_page.digits.EPOCHS", 0)
    given = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        given.append(sample("digits", 1, 2))
        assert torch.equal(torch.get_rng_state(), before)
    digits = given[0]
    np.testing.assert_array_equal(digits.ranks, given[1].ranks)
    assert digits.shapes["0.weight"] == (32, 1, 3, 3) and digits.shapes["6.weight"] == (128, 1024)
    assert [x.size for x in digits.ranks] == [151_306] * 2 and not np.array_equal(digits.ranks[0], digits.ranks[1])
    np.testing.assert_array_equal(np.concatenate([x[1].ravel() for x in digits.tensors.values()]), digits.ranks[1])


def test_gaussian_ranks_have_nothing_in_common() -> None:
    ranks = np.array(sample("gaussian", 40_000, 4).ranks, np.float64)
    np.testing.assert_allclose(np.sqrt(np.mean(ranks**2, axis=1)), RMS, rtol=0.02)
    assert np.abs(np.corrcoef(ranks) - np.eye(4)).max() < 0.03
    assert np.mean(ranks**4) / np.mean(ranks**2) ** 2 == pytest.approx(3, rel=0.05)


def test_blocky_neighbours_have_the_same_magnitude_and_ranks_a_common_part() -> None:
    ranks = np.array(sample("blocky", 500 * NEIGHBOURS, 2).ranks, np.float64)
    magnitudes = np.log(np.sqrt(np.mean(ranks[0].reshape(500, NEIGHBOURS) ** 2, axis=1)))
    assert np.std(magnitudes) == pytest.approx(1.5, rel=0.15)
    unit = ranks / np.repeat(np.exp(magnitudes), NEIGHBOURS)
    assert np.corrcoef(unit)[0, 1] == pytest.approx(0.5, abs=0.1)


def test_shuffled_is_blocky_in_another_order() -> None:
    blocky, shuffled = (np.array(sample(name, 5000, 2).ranks) for name in ("blocky", "shuffled"))
    assert not np.array_equal(blocky, shuffled)
    a, b = (np.sort(x[0] + 1j * x[1]) for x in (blocky, shuffled))  # the ranks are shuffled alike
    np.testing.assert_array_equal(a, b)


def test_embeddings_are_mostly_zero() -> None:
    ranks = np.array(sample("embedding", 64_000, 4).ranks)
    rows = ranks.reshape(4, 1000, 64).any(axis=2)
    np.testing.assert_array_equal(rows.sum(axis=1), 10)
    assert 30 < rows.any(axis=0).sum() <= 40


def test_a_gradient_without_shapes_is_the_largest_square() -> None:
    (tensor,) = sample("gaussian", 150, 2).tensors.values()
    assert tensor[0].shape == (12, 12)


def test_mistakes() -> None:
    for name, size, ranks in (("gausian", 10, 2), ("blocky", 0, 2), ("blocky", 10, 0)):
        with pytest.raises(SpecError):
            sample(name, size, ranks)
