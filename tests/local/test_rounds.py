"""Schedules and the global model: laws for random settings, over `LocalWorld`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress import LocalWorld, parse
from hvd_compress.errors import SpecError
from hvd_compress.local.rounds import Rounds, divided
from hvd_compress.local.settings import PRESETS, LocalSettings, Outer
from hvd_compress.methods.sparseloco import SparseLoCo
from hvd_compress.methods.wrappers.error_feedback import ErrorFeedback

Arr = npt.NDArray[Any]


@st.composite
def some_settings(draw: st.DrawFn) -> LocalSettings:
    fragments, interval = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    delay = draw(st.integers(0, interval - 1))
    return LocalSettings(every=fragments * interval, fragments=fragments, delay=delay)


@given(some_settings())
def test_each_fragment_has_its_turn(settings: LocalSettings) -> None:
    """Once in `every` steps; an exchange ends `delay` steps after its beginning, and before the next one begins."""
    steps = range(1, 3 * settings.every + 1)
    ends = {step: fragment for step in steps if (fragment := settings.ends(step)) is not None}
    assert [ends[step] for step in sorted(ends)] == [*range(settings.fragments)] * 3
    begins = {
        step + settings.delay: settings.begins(step) for step in range(1 - settings.delay, 3 * settings.every + 1)
    }
    assert {step: one for step, one in begins.items() if one is not None and step in steps} == ends
    flying: int | None = None
    for step in steps:
        began, ended = settings.begins(step), settings.ends(step)
        assert began is None or flying is None
        flying = began if began is not None else flying
        if ended is not None:
            assert flying == ended
            flying = None
        assert settings.flies(step) == flying


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 40))
def test_fragments_are_whole_parameters_of_about_equal_size(sizes: list[int], fragments: int) -> None:
    if fragments > len(sizes):
        with pytest.raises(SpecError, match="parameters only"):
            divided(sizes, fragments)
        return
    found = divided(sizes, fragments)
    assert [i for one in found for i in one] == [*range(len(sizes))] and all(found)
    if sizes == [7] * len(sizes):
        assert max(map(len, found)) - min(map(len, found)) <= 1


def moved(rng: np.random.Generator, arrays: list[Arr]) -> None:
    for array in arrays:
        array -= rng.standard_normal(array.shape)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.3,min_size=0,vectors=on", "qsgd:bits=4,min_size=0"])
def test_ranks_agree_and_nothing_is_lost(seed: int, spec: str) -> None:
    """With ``Outer()`` and ``mix=0``, the global model plus what has not been sent yet adds up to all local updates."""
    generator, rng, size = random.Random(seed), np.random.default_rng(seed), 3
    fragments = generator.randint(1, 3)
    settings = LocalSettings(every=fragments * generator.randint(1, 4), fragments=fragments)
    shapes = [(5, 6), (7,), (4, 4)]
    ranks = [[np.zeros(shape) for shape in shapes] for _ in range(size)]
    rounds = [Rounds(settings, arrays) for arrays in ranks]
    worlds = [LocalWorld(spec, size) for _ in range(fragments)]
    subtracted = [np.zeros(shape) for shape in shapes]
    for step in range(1, 4 * settings.every + 1):
        for arrays in ranks:
            before = [array.copy() for array in arrays]
            moved(rng, arrays)
            for i, array in enumerate(arrays):
                subtracted[i] += (before[i] - array) / size
        fragment = settings.ends(step)
        if fragment is None:
            continue
        given_ = [one.differences(fragment, arrays) for one, arrays in zip(rounds, ranks, strict=True)]
        numbers = rounds[0].members(fragment)
        means = worlds[fragment].step({str(i): [one[k] for one in given_] for k, i in enumerate(numbers)})
        for rank, (one, arrays) in enumerate(zip(rounds, ranks, strict=True)):
            after = one.apply(fragment, [means[str(i)][rank] for i in numbers], arrays, 0.0)
            for i, array in zip(numbers, after, strict=True):
                arrays[i][...] = array
        assert all(np.array_equal(a, b) for one in rounds for a, b in zip(one.anchors, rounds[0].anchors, strict=True))
        if spec.startswith("qsgd"):
            continue
        for number in range(fragments):
            for i in rounds[0].members(number):
                kept = [worlds[number].residual(rank).get(str(i), np.zeros(shapes[i])) for rank in range(size)]
                left = [rounds[0].anchors[i] - arrays[i] for arrays in ranks]
                on_its_way = np.mean([a + b for a, b in zip(kept, left, strict=True)], axis=0)
                np.testing.assert_allclose(-rounds[0].anchors[i] + on_its_way, subtracted[i], atol=1e-9)


def test_the_mean_is_the_default() -> None:
    a, b = np.array([1.0, 5.0]), np.array([3.0, 1.0])
    rounds = Rounds(LocalSettings(every=1), [np.zeros(2)])
    (after,) = rounds.apply(0, [-(a + b) / 2], [a], 0.0)
    np.testing.assert_array_equal(after, [2.0, 3.0])


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_outer_optimizer_is_sgd_of_pytorch(nesterov: bool) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    anchor, momentum, outer = rng.standard_normal(7), np.zeros(7), Outer(lr=0.3, momentum=0.8, nesterov=nesterov)
    parameter = torch.nn.Parameter(torch.tensor(anchor))
    theirs = torch.optim.SGD([parameter], lr=0.3, momentum=0.8, nesterov=nesterov)
    for _ in range(5):
        gradient = rng.standard_normal(7)
        parameter.grad = torch.tensor(gradient)
        theirs.step()
        outer.step(anchor, gradient, momentum)
        np.testing.assert_allclose(anchor, parameter.detach().numpy(), rtol=1e-12)


def test_presets_are_those_of_their_papers() -> None:
    """Templar's hparams.json, for SparseLoCo: 30 steps, an outer rate of 1, 64 of 64 x 64 numbers, and a decay."""
    sparse = PRESETS["sparseloco"]
    assert (sparse.every, sparse.outer) == (30, Outer(lr=1.0))
    assert parse(sparse.compression).core == ErrorFeedback(SparseLoCo(k=64, side=64), decay=0.95)
    assert PRESETS["diloco"].outer == Outer(lr=0.7, momentum=0.9, nesterov=True)
    for one in PRESETS.values():
        LocalWorld(one.compression, 2).step([np.ones((64, 64), np.float32)] * 2)
