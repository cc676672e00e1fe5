"""Codes of a few bits: each is that of its paper's equation."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from catalogue import one_in
from worlds import FRAMEWORKS, Arr, bucket_of, normal, ops_of

from hvd_compress.core.collectives import World
from hvd_compress.core.method import Method
from hvd_compress.errors import SpecError
from hvd_compress.methods.bf16 import BFloat16
from hvd_compress.methods.block8 import Block8
from hvd_compress.methods.fp8 import FP8
from hvd_compress.methods.loco import LoCo
from hvd_compress.methods.natural import Natural
from hvd_compress.methods.onebit import EFSignSGD, OneBit
from hvd_compress.methods.qsgd import QSGD, TernGrad
from hvd_compress.methods.sign import SignSGD, Signum
from hvd_compress.ops.blocks import Blocks
from hvd_compress.ops.coding import decode, encode
from hvd_compress.transport.lockstep import lockstep

NUMPY = ops_of("numpy")


def exchange(method: Method, xs: list[Arr], steps: int = 1, framework: str = "numpy") -> tuple[Arr, list[Any]]:
    """The total of the last of some steps with the same gradients, and the states."""
    ops, bucket = ops_of(framework), bucket_of(xs[0].shape, dtype=xs[0].dtype.name)
    states = [method.init(ops, bucket, World(0, len(xs))) for _ in xs]
    for _ in range(steps):
        results = lockstep(ops, method, bucket, [x.copy() for x in xs], states)
        states = [result.state for result in results]
    return np.asarray(results[0].total), states


def gradients(n: int, ranks: int, dtype: str = "float64") -> list[Arr]:
    return normal(bucket_of((n,), dtype=dtype), ranks)


@pytest.mark.parametrize("n", [1, 7, 64, 65, 1000])
def test_blocks_are_few_and_of_equal_size(n: int) -> None:
    blocks = Blocks.of(n, 64)
    assert blocks.number == -(-n // 64) and blocks.size <= 64
    x = np.arange(1.0, n + 1)
    np.testing.assert_array_equal(blocks.join(NUMPY, blocks.cut(NUMPY, x)), x)
    members = (blocks.cut(NUMPY, x) > 0).sum(axis=1)
    np.testing.assert_array_equal(blocks.members(NUMPY, "float64"), members)


@pytest.mark.parametrize(("norm", "bits"), one_in(3, itertools.product(["max", "l2"], [2, 3, 4, 8])))
def test_qsgd_levels_and_variance(norm: str, bits: int) -> None:
    """Multiples of norm / s next to the coordinate; the variance stays below the paper's bound (lemma 3.1)."""
    method, s, d = QSGD(bits=bits, norm=norm, block=50), 2 ** (bits - 1) - 1, 50
    (x,) = gradients(1000, 1)
    rows = x.reshape(-1, d)
    scale = np.abs(rows).max(axis=1) if norm == "max" else np.linalg.norm(rows, axis=1)
    draws = [decode(NUMPY, encode(NUMPY, x, method.code, seed), method.code, 1000, "float64") for seed in range(200)]
    for draw in draws:
        levels = draw.reshape(-1, d) / scale[:, None] * s
        np.testing.assert_allclose(levels, np.round(levels), atol=1e-9)
        assert (np.abs(levels - rows / scale[:, None] * s) < 1 + 1e-9).all()
    variance = np.mean([np.sum((draw - x) ** 2) for draw in draws])
    assert variance <= min(d / s**2, d**0.5 / s) * np.sum(x**2)


def test_terngrad_clips_then_takes_the_largest() -> None:
    """Values are -s, 0 and s; with clipping s is 2.5 standard deviations where something lies beyond them."""
    x = np.concatenate([np.random.default_rng(0).standard_normal(999), [50.0]])
    sigma = np.sqrt(np.mean(x**2))
    for method, s in [(TernGrad(), 2.5 * sigma), (TernGrad(clip=0), 50.0)]:
        total, _ = exchange(method, [x])
        np.testing.assert_allclose(np.unique(np.abs(total)), [0, s])
        assert total[-1] == pytest.approx(s)
        assert (total * x >= 0).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_natural_gives_neighbouring_powers_of_two(framework: str) -> None:
    x = np.concatenate([normal(bucket_of((500,)), 1)[0] * 1e-3, [0, -0.0, 1, -2, 2**-20, 0.75, 1e-45, -1e-40]])
    x = x.astype(np.float32)
    total, _ = exchange(Natural(), [x], framework=framework)
    big = np.abs(x) >= 2.0**-126
    exponents = np.log2(np.abs(total[big]))
    np.testing.assert_array_equal(exponents, np.round(exponents))
    assert (2.0**exponents <= 2 * np.abs(x[big])).all() and (2.0**exponents > np.abs(x[big]) / 2).all()
    np.testing.assert_array_equal(np.sign(total[big]), np.sign(x[big]))
    np.testing.assert_array_equal(total[~big], 0)
    np.testing.assert_array_equal(total[502:505], [1, -2, 2**-20])  # powers of two stay as they are
    assert total[505] in (0.5, 1)


def test_natural_keeps_the_range_of_what_it_is_given() -> None:
    """The largest exponents of float32 are within reach, and so is what is 2^125 times smaller."""
    x = np.array([2.0**127, 2.0**3, 2.0**2, 2.0**0], np.float32)
    total, _ = exchange(Natural(), [x])
    np.testing.assert_array_equal(total, [2.0**127, 2.0**3, 2.0**2, 0])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_bf16_rounds_to_nearest_even(framework: str) -> None:
    """Against the definition in integers; the sum is made in full precision and rounded once."""
    xs = normal(bucket_of((501,)), 3)
    xs[0][:4] = [1 + 2**-8, 1 + 3 * 2**-8, 3e38, 1e-40]

    def rounded(x: Arr) -> Arr:
        bits = x.astype(np.float32).view(np.uint32).astype(np.int64)
        low, high = bits % 2**16, bits // 2**16
        high += (low > 2**15) | ((low == 2**15) & (high % 2 == 1))
        result: Arr = (high * 2**16).astype(np.uint32).view(np.float32)
        return result

    total, _ = exchange(BFloat16(), xs, framework=framework)
    exact = rounded(xs[0]) + rounded(xs[1]) + rounded(xs[2])
    np.testing.assert_allclose(total, rounded(exact), rtol=0)
    one_way, _ = exchange(BFloat16(twoway=False), xs, framework=framework)
    np.testing.assert_allclose(one_way, exact, rtol=1e-6, atol=1e-39)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_onebit_sends_the_two_means(framework: str) -> None:
    xs = gradients(150, 2)
    total, _ = exchange(OneBit(block=50), xs, framework=framework)
    expected = np.zeros((3, 50))
    for x in xs:
        for row, out in zip(x.reshape(3, 50), expected, strict=True):
            out += np.where(row >= 0, row[row >= 0].mean(), row[row < 0].mean())
    np.testing.assert_allclose(total, expected.ravel(), rtol=1e-12)


def test_onebit_counts_only_what_is_there() -> None:
    """101 coordinates make blocks of 60 and 41: what fills up the second is no coordinate."""
    x = np.arange(1.0, 102.0)
    total, _ = exchange(OneBit(block=60), [x])
    np.testing.assert_allclose(total, np.repeat([x[:60].mean(), x[60:].mean()], [60, 41]))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_efsignsgd_sends_the_sign_times_the_mean_magnitude(framework: str) -> None:
    """Also where the last block is not full."""
    xs = gradients(145, 2)
    total, _ = exchange(EFSignSGD(block=50), xs, framework=framework)
    blocks = [slice(0, 50), slice(50, 100), slice(100, 145)]
    expected = sum(
        np.concatenate([np.abs(x[b]).sum() / (b.stop - b.start) * np.where(x[b] >= 0, 1, -1) for b in blocks])
        for x in xs
    )
    np.testing.assert_allclose(total, expected, rtol=1e-12)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "method", [OneBit(twoway=True), EFSignSGD(twoway=True), FP8(block=10), FP8(format="e5m2"), Block8(block=10)]
)
def test_two_way_servers_keep_what_they_do_not_send(method: Any, framework: str) -> None:
    """Algorithm 2 of Zheng et al., written out: each rank serves a part, and feeds its error back."""
    xs, ops = gradients(90, 3), ops_of("numpy")

    def code(x: Arr) -> Arr:
        decoded: Arr = decode(ops, encode(ops, x, method.code, 0), method.code, x.size, "float64")
        return decoded

    kept = [np.zeros(30)] * 3
    for _ in range(3):
        sums = [sum(code(x[30 * s : 30 * s + 30]) for x in xs) + kept[s] for s in range(3)]
        kept = [total - code(total) for total in sums]
    total, states = exchange(method, xs, steps=3, framework=framework)
    np.testing.assert_allclose(total, np.concatenate([code(total) for total in sums]), rtol=1e-9)
    for state, mine in zip(states, kept, strict=True):
        np.testing.assert_allclose(np.asarray(state.served), mine, atol=1e-12)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("twoway", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_the_majority_is_that_of_a_count(ranks: int, twoway: bool, framework: str) -> None:
    xs = gradients(501, ranks)
    total, _ = exchange(SignSGD(twoway=twoway), xs, framework=framework)
    votes = np.sum([np.where(x >= 0, 1, -1) for x in xs], axis=0)
    decided = votes != 0
    np.testing.assert_array_equal(total[decided], ranks * np.sign(votes[decided]))
    ties = total[~decided] / ranks
    assert set(np.unique(ties)) <= {-1, 1}
    if ranks % 2 == 0:
        assert abs(ties.mean()) < 5 / ties.size**0.5  # the coins are fair
        again, _ = exchange(SignSGD(twoway=twoway), xs, steps=2, framework=framework)
        assert (again[~decided] != total[~decided]).any()  # and are tossed anew


@pytest.mark.parametrize("twoway", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_zero_on_all_ranks_does_not_drift(ranks: int, twoway: bool) -> None:
    method, bucket, steps = SignSGD(twoway=twoway), bucket_of((60,)), 400
    states = [method.init(NUMPY, bucket, World(0, ranks)) for _ in range(ranks)]
    moved = np.zeros(60)
    for step in range(steps):
        xs = normal(bucket, ranks, seed=step)
        for x in xs:
            x[::2] = 0
        results = lockstep(NUMPY, method, bucket, xs, states)
        states = [result.state for result in results]
        for result in results[1:]:
            np.testing.assert_array_equal(result.total, results[0].total)
        moved += np.asarray(results[0].total) / ranks
    assert np.abs(moved[::2]).max() < 5 * steps**0.5


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_rank_is_not_outvoted_by_those_whose_gradient_is_zero(framework: str) -> None:
    """Zeros vote as the coin of their rank falls, so that most of them cancel."""
    xs = [np.zeros(60, np.float32) for _ in range(7)]
    xs[0][:] = -1
    totals = [exchange(SignSGD(seed=seed), xs, framework=framework)[0] for seed in range(20)]
    assert np.mean(totals) < -1


def test_signum_votes_with_the_running_mean() -> None:
    method, bucket, beta = Signum(beta=0.9), bucket_of((300,), dtype="float64"), 0.9
    states, means = [method.init(NUMPY, bucket, World(0, 3)) for _ in range(3)], [np.zeros(300)] * 3
    for step in range(5):
        xs = normal(bucket, 3, seed=step)
        results = lockstep(NUMPY, method, bucket, [x.copy() for x in xs], states)
        states = [result.state for result in results]
        means = [beta * m + (1 - beta) * x for m, x in zip(means, xs, strict=True)]
        np.testing.assert_array_equal(results[0].total, 3 * np.sign(sum(np.sign(m) for m in means)))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_loco_follows_its_equations(framework: str) -> None:
    """One rank, so that the server gets what was sent: both error memories, up to their rounding to 8 bits."""
    method, (x,) = LoCo(block=40, reset=4, beta=0.7), gradients(120, 1)

    def rounded(v: Arr, levels: int) -> Arr:
        rows = v.reshape(3, 40)
        unit = np.abs(rows).max(axis=1, keepdims=True) / levels
        unit[unit == 0] = 1
        result: Arr = (np.floor(rows / unit + 0.5) * unit).ravel()
        return result

    sent_error = served_error = np.zeros(120)
    for step in range(1, 7):
        h = x + sent_error
        q = rounded(h, 7)
        total = q + served_error
        answer = rounded(total, 7)
        stays = 0.0 if step % 4 == 0 else 1.0
        sent_error = rounded(stays * (0.7 * sent_error + 0.3 * (h - q)), 127)
        served_error = rounded(stays * (0.7 * served_error + 0.3 * (total - answer)), 127)
        got, (state,) = exchange(method, [x], steps=step, framework=framework)
        np.testing.assert_allclose(got, answer, atol=1e-9)
        kept = np.asarray(state.sent.data)
        assert kept.dtype == np.uint8 and kept.size == 3 * 8 + 120
        assert (kept[24:] != 127).any() == (step % 4 != 0)  # 127 stands for 0


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        (QSGD, {"bits": 1}, "bits=1 is not allowed: bits must be 2 to 8"),
        (QSGD, {"norm": "l1"}, "norm='l1' is not allowed"),
        (QSGD, {"block": 0}, "block=0 is not allowed"),
        (TernGrad, {"clip": -1.0}, "clip=-1.0 is not allowed"),
        (OneBit, {"block": 0}, "block=0 is not allowed"),
        (EFSignSGD, {"block": 0}, "block=0 is not allowed"),
        (Signum, {"beta": 1.0}, "beta=1.0 is not allowed"),
        (LoCo, {"bits": 9}, "bits=9 is not allowed"),
        (LoCo, {"beta": 1.0}, "beta=1.0 is not allowed"),
        (LoCo, {"reset": -1}, "reset=-1 is not allowed"),
        (Natural, {"seed": -1}, "seed=-1 is not allowed"),
        (FP8, {"format": "e3m4"}, "format='e3m4' is not allowed: format must be 'e4m3' or 'e5m2'"),
        (FP8, {"block": 0}, "block=0 is not allowed"),
        (FP8, {"seed": 2**32}, "seed=4294967296 is not allowed"),
        (Block8, {"block": 0}, "block=0 is not allowed"),
    ],
)
def test_bad_parameters(kind: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        kind(**params)
