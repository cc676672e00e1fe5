"""The search for the best partition: on step times that follow a model, with and without noise."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress.core.bucketing import Cuts, pin, start
from hvd_compress.engine.bucket_autotune import STEPS, TIMED, WARM_UP, Search
from hvd_compress.engine.timing import GAIN, Timing

MODEL = [4 * random.Random(0).choice([64, 1024, 65536, 2**18, 2**20]) for _ in range(60)]
"""Bytes of the gradients."""

SECONDS = {
    "a fixed cost that two buckets pay for": (2e-3, 2e-8),
    "no cost of compression, a slow network": (1e-5, 4e-8),
    "a high fixed cost": (0.2, 1e-9),
    "nothing to hide": (2e-3, 0.0),
}
"""Of each compression, and of each byte on the wire."""


def step(cuts: Cuts, sizes: list[int], fixed: float, wire: float) -> float:
    """How long a step takes whose buckets travel, one after another, while backward goes on."""
    clock = free = 0.0
    for first, last in zip((0, *cuts), (*cuts, len(sizes)), strict=True):
        size = sum(sizes[first:last])
        clock += 1e-8 * size + fixed
        free = max(clock, free) + wire * size
    return max(clock, free)


def searched(sizes: list[int], seconds: Callable[[Cuts], float]) -> Search:
    """A search with these step times, to its end."""
    search = Search(sizes)
    while not search.settled:
        timing = search.record(seconds(search.cuts))
        if timing is not None:
            search.decide(timing)
    return search


@pytest.mark.parametrize("case", SECONDS)
def test_it_finds_what_is_close_to_the_best(case: str) -> None:
    """Of all partitions into one, two or three buckets; never worse than what it began with."""
    sizes = MODEL[:30]
    every = [cuts for n in range(3) for cuts in combinations(range(1, len(sizes)), n)]
    best = min(step(cuts, sizes, *SECONDS[case]) for cuts in every)
    search = searched(sizes, lambda cuts: step(cuts, sizes, *SECONDS[case]))
    found, begin = (step(cuts, sizes, *SECONDS[case]) for cuts in (search.cuts, start(sizes)))
    assert found <= min(1.06 * best, begin), search.news()


def test_the_number_of_buckets_is_searched_too() -> None:
    one, more = (
        searched(MODEL, partial(step, sizes=MODEL, fixed=fixed, wire=wire))
        for fixed, wire in (SECONDS["a high fixed cost"], SECONDS["no cost of compression, a slow network"])
    )
    assert one.cuts == () and len(more.cuts) >= 2


def noisy(seed: int, seconds: Callable[[Cuts], float], noise: float) -> Search:
    """A search in which steps vary, and now and then one takes very long."""
    rng = random.Random(seed)
    return searched(MODEL, lambda cuts: seconds(cuts) * (1 + abs(rng.gauss(0, noise)) + 9 * (rng.random() < 0.05)))


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_noise_moves_nothing(noise: float) -> None:
    """All partitions are alike. Now and then one wins nevertheless, but seldom."""
    assert sum(noisy(seed, lambda _: 1.0, noise).cuts != start(MODEL) for seed in range(50)) <= 5


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_a_clear_gain_is_found_in_spite_of_noise(noise: float) -> None:
    for seed in range(20):
        search = noisy(seed, lambda cuts: step(cuts, MODEL, *SECONDS["a high fixed cost"]), noise)
        assert search.cuts == (), search.news()


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=200), st.integers(0, 2**32))
def test_it_ends_in_time_whatever_it_is_told(sizes: list[int], seed: int) -> None:
    rng = random.Random(seed)
    search = searched(sizes, lambda _: rng.choice([1.0, 1.5, 2.0, 2.5, 30.0]))
    assert search.steps <= STEPS
    assert list(search.cuts) == sorted(set(search.cuts)) and set(search.cuts) <= set(range(1, len(sizes)))


def test_one_gradient_needs_no_search() -> None:
    search = Search([400])
    assert (search.settled, search.cuts, search.steps) == (True, (), 0)


def test_a_candidate_that_was_lucky_once_does_not_win() -> None:
    """Something looks twice as fast when it is tried, and as fast as the first when it is measured once more."""
    tried: list[Cuts] = []

    def seconds(cuts: Cuts) -> float:
        if tried[-1:] != [cuts]:
            tried.append(cuts)
        return 0.5 if cuts == () and tried.count(()) == 1 else 1.0

    search = searched([10, 10], seconds)
    assert search.cuts == start([10, 10])
    assert tried == [(1,), (), (1,), ()]


@pytest.mark.parametrize(
    ("mine", "other", "beats"),
    [
        ([1.0] * TIMED, [1.0 + 2 * GAIN] * TIMED, True),
        ([1.0] * TIMED, [1.0 + GAIN / 2] * TIMED, False),
        ([1.0, 1.1, 0.9, 1.2, 0.8], [1.15, 1.05, 1.25, 0.95, 1.2], False),
        ([1.0, 1.0, 1.0, 1.0, 99.0], [1.2, 1.2, 1.2, 1.2, 0.1], True),
    ],
)
def test_faster_by_more_than_chance(mine: list[float], other: list[float], beats: bool) -> None:
    assert Timing.of(mine).beats(Timing.of(other)) is beats


def test_the_first_steps_and_those_after_a_change_do_not_count() -> None:
    """Each candidate's steps take 0, then 1, 2, 3, 4 and 5; those of the warm-up take 0, too."""
    steps: list[Cuts] = []

    def seconds(cuts: Cuts) -> float:
        changed = steps[-1:] != [cuts]
        steps.append(cuts)
        return 0.0 if changed or len(steps) <= WARM_UP + 1 else (len(steps) - WARM_UP - 1) % (TIMED + 1)

    timings = searched([10] * 8, seconds).timings
    assert len(timings) > 3 and set(timings) == {Timing(3.0, 1.0)}


def test_it_ends_although_each_candidate_is_better_than_all_before() -> None:
    candidates: list[Cuts] = []

    def seconds(cuts: Cuts) -> float:
        if candidates[-1:] != [cuts]:
            candidates.append(cuts)
        return 0.9 ** len(candidates) if cuts else 1.0

    search = searched(MODEL, seconds)
    assert search.steps == STEPS and len(search.cuts) > 1


def test_a_saved_search_goes_on() -> None:
    """From any of its candidates, to the same end."""

    def seconds(cuts: Cuts) -> float:
        return step(cuts, MODEL, *SECONDS["no cost of compression, a slow network"])

    whole = searched(MODEL, seconds)
    for number in range(len(whole.timings)):
        second = Search(MODEL, [list(timing) for timing in whole.timings[:number]])
        settled = [second.settled]
        for timing in whole.timings[number:]:
            second.decide(timing)
        assert [*settled, second.settled] == [False, True]
        assert (second.cuts, second.timings) == (whole.cuts, whole.timings)


def test_it_says_what_it_found() -> None:
    search = searched(MODEL, lambda cuts: step(cuts, MODEL, *SECONDS["a high fixed cost"]))
    report = search.news()
    assert report.startswith(f"merge='search' chose merge=1 after {search.steps} steps; candidates")
    assert report.count(f"merge={pin(start(MODEL))!r} ") == 1, "all times of a candidate stand beside it"
    assert report.count(" and ") > 1
    assert "merge=1 after 0 steps" in Search([4]).news()
