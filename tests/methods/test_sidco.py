"""SIDCo: the fits of the paper, and that what is sent is within 10% of the target whatever the distribution."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from catalogue import one_in
from worlds import COMPILED, FRAMEWORKS, Arr, bucket_of, leaves, normal, ops_of

from hvd_compress.core.collectives import World
from hvd_compress.errors import SpecError
from hvd_compress.methods.sidco import CORRECTIONS, TINY, SIDCo, SIDCoState
from hvd_compress.methods.wrappers.error_feedback import ErrorFeedback
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.transport.lockstep import lockstep

NUMPY = ops_of("numpy")
FITS = ["exponential", "gamma", "pareto"]
RATIOS = [0.1, 0.01, 0.001]
MILLION = 2**20


def heavy(shape: float) -> Callable[[np.random.Generator, int], Arr]:
    """Draws from a generalised Pareto distribution, by the inverse of its distribution function."""
    return lambda rng, n: ((1 - rng.random(n)) ** -shape - 1) / shape


DRAWS: dict[str, Callable[[np.random.Generator, int], Arr]] = {
    "exponential": lambda rng, n: rng.exponential(size=n),
    "gamma 0.5": lambda rng, n: rng.gamma(0.5, size=n),
    "gamma 2": lambda rng, n: rng.gamma(2, size=n),
    "pareto 0.2": heavy(0.2),
    "pareto 0.4": heavy(0.4),
    "pareto 0.8": heavy(0.8),
    "normal": lambda rng, n: rng.standard_normal(n),
    "uniform": lambda rng, n: rng.random(n),
}


def draw(name: str, n: int = MILLION, seed: int = 0) -> Arr:
    """Numbers of a distribution, with random signs."""
    rng = np.random.default_rng(seed)
    x: Arr = DRAWS[name](rng, n) * rng.choice([-1, 1], n)
    return x.astype(np.float32)


def state_of(stages: float, achieved: float = 0.0, step: int = 0) -> SIDCoState:
    return SIDCoState(np.array(stages), np.array(achieved), step)


def fitted(method: SIDCo, x: Arr, stages: int = 1) -> float:
    """The threshold of the paper's part alone."""
    peak = np.abs(x.astype(np.float64)).max()
    everything = NUMPY.tail(x, peak, TINY, logs=True)
    return float(
        method.threshold(NUMPY, x, peak, everything, np.array(math.log(method.ratio)), np.array(float(stages))) * peak
    )


@pytest.mark.long
@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("name", list(DRAWS))
def test_what_is_sent_is_near_the_target(name: str, fit: str) -> None:
    """With any number of stages, so at the first step and whenever S has settled."""
    x, bucket = draw(name), bucket_of((MILLION,))
    size = np.abs(x)
    for ratio in RATIOS:
        method = SIDCo(ratio=ratio, fit=fit)
        for stages in {1, (method.most_stages + 1) // 2, method.most_stages}:
            indices, _ = method.select(NUMPY, bucket, x, state_of(stages))
            assert abs(len(indices) / (ratio * MILLION) - 1) <= 0.1001
            assert size[indices].min() >= np.delete(size, indices).max()  # the largest ones, none else


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(
    ("fit", "name"), [("exponential", "exponential"), ("pareto", "exponential"), ("pareto", "pareto 0.2")]
)
def test_a_fit_to_its_own_distribution_needs_no_correction(fit: str, name: str, ratio: float) -> None:
    x = draw(name)
    passed = np.sum(np.abs(x) >= fitted(SIDCo(ratio=ratio, fit=fit), x))
    assert abs(passed / (ratio * MILLION) - 1) < 0.1


class WithoutTopK(NumpyOps):
    """Refuses the exact top-k."""

    def top_indices(self, x: Arr, k: int) -> Arr:
        raise AssertionError(f"{CORRECTIONS} corrections did not suffice")


@pytest.mark.parametrize(("name", "fit"), one_in(4, itertools.product([x for x in DRAWS if x != "uniform"], FITS)))
def test_a_settled_fit_needs_no_top_k(name: str, fit: str) -> None:
    x, bucket, method = draw(name, 100_000), bucket_of((100_000,)), SIDCo(ratio=0.01, fit=fit)
    state, lengths = method.init(NUMPY, bucket, World(0, 1)), []
    for step in range(30):
        indices, state = method.select(NUMPY if step < 20 else WithoutTopK(), bucket, x, state)
        lengths.append(len(indices))
    assert max(abs(length / 1000 - 1) for length in lengths) <= 0.1


def test_equations_of_one_stage() -> None:
    x, d = draw("gamma 2", 5000), 0.01
    a = np.abs(x.astype(np.float64))
    mean, var = a.mean(), a.var()
    np.testing.assert_allclose(fitted(SIDCo(ratio=d), x), -mean * math.log(d))
    k, scale = (mean**2 / var - 1) / 2, mean * (mean**2 / var + 1) / 2
    np.testing.assert_allclose(fitted(SIDCo(ratio=d, fit="pareto"), x), scale * (1 - d**k) / k)
    s = math.log(mean) - np.log(a).mean()
    alpha = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    assert 1.9 < alpha < 2.1  # the shape that was drawn
    threshold = -mean / alpha * (math.log(d) + math.lgamma(alpha))
    np.testing.assert_allclose(fitted(SIDCo(ratio=d, fit="gamma"), x), threshold)


def test_equations_of_three_stages() -> None:
    x, d = draw("normal", 50_000), 0.01
    a, q = np.abs(x.astype(np.float64)), (0.01 / 0.25) ** (1 / 2)
    t = -a.mean() * math.log(0.25)
    for _ in range(2):
        t = t - (a[a > t].mean() - t) * math.log(q)
    np.testing.assert_allclose(fitted(SIDCo(ratio=d), x, stages=3), t)

    t = 0.0
    for share in (0.25, q, q):
        y = a[a > t] - t
        r = y.mean() ** 2 / y.var()
        k = (r - 1) / 2
        t += y.mean() * (r + 1) / 2 * (1 - share**k) / k
    np.testing.assert_allclose(fitted(SIDCo(ratio=d, fit="pareto"), x, stages=3), t)
    later = fitted(SIDCo(ratio=d, fit="gamma"), x, stages=3)
    assert later not in (fitted(SIDCo(ratio=d, fit="gamma"), x), t) and abs(later / t - 1) < 0.1


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_ratio_of_a_quarter_or_more_has_one_stage(stages: int) -> None:
    x = draw("normal", 5000)
    np.testing.assert_allclose(fitted(SIDCo(ratio=0.3, stages=4), x, stages), -np.abs(x).mean() * math.log(0.3), 1e-6)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("mean", "stages", "after"), [(1.21, 3, 2), (1.19, 3, 3), (0.81, 3, 3), (0.79, 3, 4), (1.3, 1, 1), (0.5, 7, 7)]
)
def test_stages_move_every_five_steps(framework: str, mean: float, stages: int, after: int) -> None:
    """``ceil(log2 100)`` = 7 is the most."""
    method, ops = SIDCo(ratio=0.01), ops_of(framework)
    state: Any = SIDCoState(ops.constant(np.array(float(stages))), ops.constant(np.array(0.0)), 0)
    for step in range(1, 6):
        state = method._adapted(ops, state, state.achieved + mean)
        assert float(state.stages) == (after if step == 5 else stages)
    assert float(state.achieved) == 0 and state.step == 5


def test_what_the_fit_achieves_is_what_counts() -> None:
    """An exponential tail is too long for a normal distribution; the sum of achieved / target says by how much."""
    x, bucket, method = draw("normal", 100_000), bucket_of((100_000,)), SIDCo(ratio=0.01)
    state = method.init(NUMPY, bucket, World(0, 1))
    achieved = np.sum(np.abs(x) >= fitted(method, x)) / 1000
    assert achieved < 0.5
    for step in range(4):
        _, state = method.select(NUMPY, bucket, x, state)
        np.testing.assert_allclose(state.achieved, (step + 1) * achieved)
    _, state = method.select(NUMPY, bucket, x, state)
    assert (float(state.stages), float(state.achieved), state.step) == (2, 0, 5)


def test_a_fixed_number_of_stages_stays() -> None:
    x, bucket, method = draw("normal", 10_000), bucket_of((10_000,)), SIDCo(ratio=0.01, stages=2)
    state = method.init(NUMPY, bucket, World(0, 1))
    for _ in range(6):
        _, state = method.select(NUMPY, bucket, x, state)
    assert (float(state.stages), float(state.achieved), state.step) == (2, 0, 6)


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("name", ["gamma 0.5", "normal", "uniform"])
@pytest.mark.parametrize("framework", COMPILED)
def test_frameworks_choose_the_same(framework: str, name: str, fit: str) -> None:
    bucket, method, ops = bucket_of((20_000,)), SIDCo(ratio=0.01, fit=fit), ops_of(framework)
    mine, theirs = method.init(NUMPY, bucket, World(0, 1)), method.init(ops, bucket, World(0, 1))
    for step in range(11):
        x = draw(name, 20_000, seed=step)
        expected, mine = method.select(NUMPY, bucket, x, mine)
        indices, theirs = method.select(ops, bucket, ops.constant(x), theirs)
        np.testing.assert_array_equal(np.asarray(indices), expected)
    assert ops.dtype(theirs.stages) == ops.dtype(theirs.achieved) == "float64" and theirs.step == 11
    for path, leaf in leaves(mine).items():
        np.testing.assert_allclose(leaves(theirs)[path], leaf, rtol=1e-9)


def degenerate(dtype: str) -> dict[str, Arr]:
    """What breaks fits: ties, zeros, and numbers whose squares leave the range."""
    limits, x = np.finfo(dtype), normal(bucket_of((1000,), dtype=dtype), 1)[0]
    few = np.zeros(1000, dtype)
    few[[3, 500]] = [1, -2]
    zeros = np.where(np.arange(1000) % 10 == 0, x, 0)
    return {
        "zero": np.zeros(1000, dtype),
        "equal": np.full(1000, -3, dtype),
        "few": few,
        "mostly zero": zeros.astype(dtype),
        "two values": np.where(np.arange(1000) < 990, 1, 2).astype(dtype),
        "one huge": np.concatenate([x[:999], [limits.max]]).astype(dtype),
        "huge": (x / np.abs(x).max() * limits.max).astype(dtype),
        "tiny": (x * limits.tiny * 8).astype(dtype),
        "denormal": (np.round(x * 100) * limits.smallest_subnormal).astype(dtype),
    }


@pytest.mark.parametrize(
    ("name", "dtype", "fit", "stages"),
    one_in(5, itertools.product(degenerate("float32"), ["float32", "float64"], FITS, [1, 7])),
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_degenerate_gradients(framework: str, name: str, dtype: str, fit: str, stages: int) -> None:
    """The target is met to 10%, or all that is not zero is sent."""
    x, ops, method = degenerate(dtype)[name], ops_of(framework), SIDCo(ratio=0.02, fit=fit, stages=stages)
    bucket = bucket_of((1000,), dtype=dtype)
    indices = np.asarray(method.select(ops, bucket, ops.constant(x), method.init(ops, bucket, World(0, 1)))[0])
    size = np.abs(x.astype(np.float64))
    nonzero = np.sum(size >= 2.0**-1022 * size.max()) if x.any() else 0  # smaller ones count as zero
    assert (x[indices] != 0).all() and len(np.unique(indices)) == len(indices)
    assert abs(len(indices) - min(20, nonzero)) <= 2
    if len(indices) < nonzero:
        assert size[indices].min() >= np.delete(size, indices).max()


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("value", [5.0, 0.0, -1e-40])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_one_coordinate(framework: str, value: float, fit: str) -> None:
    ops, bucket, method = ops_of(framework), bucket_of((1,)), SIDCo(fit=fit)
    x = np.array([value], np.float32)
    (result,) = lockstep(ops, method, bucket, [x], [method.init(ops, bucket, World(0, 1))])
    np.testing.assert_array_equal(np.asarray(result.total), x)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_ranks_may_send_differently_many(framework: str) -> None:
    ops, bucket = ops_of(framework), bucket_of((3000,))
    method = ErrorFeedback(SIDCo(ratio=0.1))
    xs = [draw("normal", 3000), np.zeros(3000, np.float32), draw("uniform", 3000)]
    results = lockstep(ops, method, bucket, xs, [method.init(ops, bucket, World(0, 3)) for _ in xs])
    kept = sum(np.asarray(result.state.residual) for result in results)
    for result in results:
        np.testing.assert_allclose(np.asarray(result.total) + kept, sum(xs), atol=1e-6)
    assert np.count_nonzero(np.asarray(results[1].state.residual)) == 0


def test_a_ratio_of_one_sends_all() -> None:
    (x,) = normal(bucket_of((100,)), 1)
    method = SIDCo(ratio=1.0)
    assert method.most_stages == 1
    assert len(method.select(NUMPY, bucket_of((100,)), x, state_of(1))[0]) == 100


@pytest.mark.parametrize("wrong", [{"ratio": 0.0}, {"ratio": 1.5}, {"fit": "normal"}, {"stages": -1}, {"values": "x"}])
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(wrong))):
        SIDCo(**wrong)
