"""Ok-Topk: the algorithm of the paper, a payload that does not grow with the ranks, and nothing lost on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from worlds import FRAMEWORKS, Arr, bucket_of, normal, ops_of

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllToAll, Collective, World
from hvd_compress.errors import SpecError
from hvd_compress.methods.oktopk import OkTopK, OkTopKState
from hvd_compress.methods.wrappers.error_feedback import ErrorFeedback, ErrorFeedbackState
from hvd_compress.ops import Ops
from hvd_compress.transport.lockstep import lockstep
from hvd_compress.transport.mirror import share

NUMPY = ops_of("numpy")


class Run:
    """Ranks with error feedback.

    Attributes:
        totals: Totals of all ranks in the last step.
        messages: Collectives of a rank in the last step.
    """

    def __init__(self, method: OkTopK, bucket: Bucket, ranks: int, ops: Ops = NUMPY) -> None:
        self._ops, self._method, self._bucket = ops, ErrorFeedback(method), bucket
        self.states: list[Any] = [self._method.init(ops, bucket, World(rank, ranks)) for rank in range(ranks)]
        self.totals: list[Arr] = []
        self.messages: list[Collective] = []

    def step(self, xs: list[Arr]) -> Arr:
        """Exchange one gradient per rank, and return the total."""
        self.messages = []
        results = lockstep(self._ops, self._method, self._bucket, xs, self.states, self.messages.append)
        self.states = [result.state for result in results]
        self.totals = [np.asarray(result.total) for result in results]
        return self.totals[0]

    @property
    def residuals(self) -> list[Arr]:
        return [np.asarray(state.residual) for state in self.states]

    @property
    def sent(self) -> float:
        """Bytes that a rank sends over the wire in the last step; messages of all ranks are equally long."""
        return float(sum(m.array.nbytes * share(type(m).__name__, len(self.states)) for m in self.messages))


def fits(n: int, k: int) -> bool:
    return 2 * k / 3 <= n <= 5 * k / 4


def largest(x: Arr, k: int) -> float:
    """The k-th largest magnitude."""
    return float(np.sort(np.abs(x))[-k])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_it_is_the_algorithm_of_the_paper(ranks: int, framework: str) -> None:
    """Algorithms 1 and 2, which know no regions: these decide who sums, and limit nothing while they are balanced."""
    d, k, period = 20_000, 2000, 4
    bucket = bucket_of((d,), dtype="float64")
    run = Run(OkTopK(ratio=k / d, period=period), bucket, ranks, ops_of(framework))
    residuals, local, shared, left = [np.zeros(d)] * ranks, [0.0] * ranks, 0.0, 0
    reused = 0
    for step in range(9):
        xs = [x * (0.35 if step else 1) for x in normal(bucket, ranks, seed=step)]  # so that thresholds fit for a while
        ps = [x + e for x, e in zip(xs, residuals, strict=True)]
        for i, p in enumerate(ps):
            if left == 0 or not fits(np.count_nonzero(np.abs(p) >= local[i]), k):
                local[i] = largest(p, k)
        sent = [p * (np.abs(p) >= t) for p, t in zip(ps, local, strict=True)]
        sums = np.sum(sent, axis=0)
        reused += left > 0
        if left == 0:
            shared, left = largest(sums, k), period
        chosen = np.abs(sums) >= shared
        left = left - 1 if fits(np.count_nonzero(chosen), k) else 0
        residuals = [p - s * chosen for p, s in zip(ps, sent, strict=True)]

        np.testing.assert_allclose(run.step(xs), sums * chosen, rtol=1e-12, atol=1e-12)
        for mine, expected in zip(run.residuals, residuals, strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-12, atol=1e-12)
    assert 4 <= reused <= 7


def decaying(bucket: Bucket, ranks: int, seed: int) -> list[Arr]:
    """Nearly all of the large coordinates are among the first tenth."""
    return [x * np.exp(-np.arange(x.size, dtype=np.float32) * 30 / x.size) for x in normal(bucket, ranks, seed)]


def apart(bucket: Bucket, ranks: int, seed: int) -> list[Arr]:
    """Each rank has large coordinates in a place of its own."""
    place = np.arange(bucket.numel) * ranks // bucket.numel
    return [np.where(place == rank, 1000 * x, x) for rank, x in enumerate(normal(bucket, ranks, seed))]


def jumping(bucket: Bucket, ranks: int, seed: int) -> list[Arr]:
    """The scale changes by 1000."""
    return [x * np.float32(1000.0 ** (seed % 3 - 1)) for x in normal(bucket, ranks, seed)]


def alike(bucket: Bucket, ranks: int, seed: int) -> list[Arr]:
    """All magnitudes are equal, so a threshold selects everything or nothing."""
    return [np.sign(x) for x in normal(bucket, ranks, seed)]


@pytest.mark.parametrize("gradients", [normal, decaying, apart, jumping, alike])
@pytest.mark.parametrize("ranks", range(2, 17))
def test_the_payload_is_below_that_of_the_paper(ranks: int, gradients: Any) -> None:
    """Less than 6 k (n-1)/n words of 4 bytes leave a rank in any step."""
    bucket, k = bucket_of((20_000,)), 1000
    run = Run(OkTopK(ratio=0.05, period=4), bucket, ranks)
    for step in range(6):
        run.step(gradients(bucket, ranks, step))
        assert run.sent < 6 * 4 * k * (ranks - 1) / ranks
        assert {type(m).__name__ for m in run.messages} == {"AllReduce", "AllToAll", "AllGather"}


def test_the_payload_does_not_grow_with_the_ranks() -> None:
    """That of top-k does, by a factor of 7.5 from 2 ranks to 16: ``6 k (n-1)`` bytes."""
    bucket, sent = bucket_of((100_000,)), {}
    for ranks in (2, 16):
        run = Run(OkTopK(ratio=0.01), bucket, ranks)
        steps = [run.step(normal(bucket, ranks, seed)) is not None and run.sent for seed in range(8)]
        sent[ranks] = sum(steps) / len(steps)
    assert sent[16] / (15 / 16) < 1.15 * sent[2] / (1 / 2)


D = 60


def one(*places: int) -> Arr:
    x = np.zeros(D)
    x[list(places)] = 1 + np.arange(len(places))
    return x


CASES: dict[str, tuple[float, list[Arr]]] = {
    "only zeros": (0.1, [np.zeros(D)] * 3),
    "fewer than k": (0.5, [one(3), one(3, 59), one(30)]),
    "ties": (0.1, [np.ones(D), -np.ones(D) / 2, np.ones(D)]),
    "one coordinate": (1e-9, [one(3, 4), one(4, 5), one(59)]),
    "more ranks than coordinates": (0.5, [np.arange(1.0, 4) * sign for sign in (1, 2, -1, 3, 1, 1, 5, 1)]),
    "one rank": (0.1, [np.arange(D) - 20.0]),
    "one region": (0.2, [one(*range(10, 30)), one(*range(10, 30)), one(*range(10, 30))]),
    "a rank without anything": (0.1, [np.arange(D) - 20.0, np.zeros(D), np.arange(D) / 3]),
    "sums that cancel": (0.2, [one(1, 2, 3, 50), -one(1, 2, 3, 50)]),
    "all": (1.0, [np.arange(D) - 20.0, np.arange(D) / 3]),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_lost(case: str, dtype: str, framework: str) -> None:
    """All ranks get equal bits; what they got and kept back is what they were given, also as the scale changes."""
    ratio, xs = CASES[case]
    bucket = bucket_of(xs[0].shape, dtype=dtype)
    run = Run(OkTopK(ratio=ratio, period=3), bucket, len(xs), ops_of(framework))
    given, got = np.zeros(xs[0].size), np.zeros(xs[0].size)
    for scale in (1, 1, 1000, 1, 1, 0.001, 1, 1):
        scaled = [(x * scale).astype(dtype) for x in xs]
        given += np.sum(scaled, axis=0)
        got += run.step(scaled)
        for total in run.totals:
            np.testing.assert_array_equal(total, run.totals[0])
    np.testing.assert_allclose(got + sum(run.residuals), given, rtol=1e-4 if dtype == "float32" else 1e-12)
    assert got.any() == (case not in ("only zeros", "sums that cancel"))


def test_after_the_scale_has_fallen_it_goes_on_in_the_next_step() -> None:
    """Thresholds that select nothing, or everything, are evaluated again before their time."""
    bucket = bucket_of((1000,))
    run = Run(OkTopK(ratio=0.1, period=100), bucket, 4)
    counts = []
    for seed, scale in enumerate((1e3, 1e-3, 1e-3, 1e3, 1e3)):
        for state in run.states:
            state.residual[:] = 0
        xs = [x * np.float32(scale) for x in normal(bucket, 4, seed)]
        counts.append(np.count_nonzero(run.step(xs)))
        for x, state in zip(xs, run.states, strict=True):
            assert 80 < np.count_nonzero(np.abs(x) >= state.inner.local) <= 125
    assert counts[0] == counts[2] == counts[4] == 100
    assert counts[1] == 0 and 100 < counts[3] <= 125 + 4


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_owners_with_most_of_the_sums_deal_them_out(framework: str) -> None:
    """Each rank has 25 large coordinates in the first quarter of its 100: the first two of 8 owners have all of T."""
    ops, method, bucket, ranks = ops_of(framework), OkTopK(ratio=0.1), bucket_of((1000,)), 8
    xs = [np.zeros(1000, np.float32) for _ in range(ranks)]
    for rank, x in enumerate(xs):
        x[rank:200:ranks] = np.arange(10, 35)
        x[rank + 200 : 800 : ranks] = 1
    thresholds = [ops.constant(np.array(t, np.float32)) for t in (0.5, 5)]
    messages: list[Collective] = []
    results = lockstep(ops, method, bucket, xs, [OkTopKState(9, *thresholds)] * ranks, messages.append)
    assert [isinstance(m, AllToAll) for m in messages] == [False, True, False, True, False]
    total = np.asarray(results[0].total)
    places = np.flatnonzero(total)
    np.testing.assert_array_equal(total[places], np.sum(xs, axis=0)[places])
    assert places.max() < 200
    assert 8 * 16 * 0.95 <= places.size <= 125 + 2
    assert results[0].state.left == 0  # T had 200 coordinates


def test_only_what_arrives_counts_as_sent() -> None:
    """Coordinates of S_i that are not in T stay, and keep their momentum."""
    bucket, method = bucket_of((1000,), dtype="float64"), OkTopK(ratio=0.1)
    xs = normal(bucket, 3)
    results = lockstep(NUMPY, method, bucket, xs, [method.init(NUMPY, bucket, World(0, 3))] * 3)
    for x, result in zip(xs, results, strict=True):
        mine: Any = result.sent_indices
        selected = np.abs(x) >= largest(x, 100)
        expected = np.flatnonzero(selected & (result.total != 0))
        assert np.isin(mine.rows, expected).all() and 0 < mine.rows.size < 100


def test_states_are_those_of_error_feedback_and_two_thresholds() -> None:
    run = Run(OkTopK(ratio=0.1), bucket_of((100,)), 2)
    run.step(normal(bucket_of((100,)), 2))
    first, second = run.states
    assert isinstance(first, ErrorFeedbackState) and first.inner.left == 31
    assert first.inner.shared == second.inner.shared != 0
    assert first.inner.local != second.inner.local


@pytest.mark.parametrize(("params", "message"), [({"ratio": 0.0}, "ratio=0.0"), ({"period": 0}, "period=0")])
def test_bad_parameters(params: Any, message: str) -> None:
    with pytest.raises(SpecError, match=f"{message} is not allowed"):
        OkTopK(**params)
