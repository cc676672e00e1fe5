"""Homomorphic compression: exact sums of sparse gradients, and right ones of all others."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from worlds import COMPILED, FRAMEWORKS, Arr, bucket_of, normal, ops_of

from hvd_compress import LocalWorld
from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import (
    SaturatingSum,
    World,
)
from hvd_compress.errors import SpecError
from hvd_compress.methods import homomorphic
from hvd_compress.methods.homomorphic import Homomorphic
from hvd_compress.ops import Ops, mix_seed
from hvd_compress.ops import sketch as sketches
from hvd_compress.ops.packing import unpack
from hvd_compress.transport.lockstep import lockstep

NUMPY = ops_of("numpy")


def sparse(bucket: Bucket, ranks: int, keys: int, seed: int = 0, spread: float = 2.0) -> list[Arr]:
    """Gradients that together are not zero at so many places; magnitudes spread over ``e**(+-4 spread)``."""
    rng = np.random.default_rng(seed)
    places = rng.permutation(bucket.numel)[:keys]
    xs = np.zeros((ranks, bucket.numel), bucket.dtype)
    values = rng.standard_normal((ranks, keys)) * np.exp(spread * rng.standard_normal((ranks, keys)))
    present = rng.random((ranks, keys)) < 0.5
    present[rng.integers(0, ranks, keys), np.arange(keys)] = True
    xs[:, places] = np.where(present, values, 0)
    return list(xs)


def exact(xs: list[Arr]) -> Arr:
    """The correctly rounded sum."""
    return np.array([math.fsum(column) for column in np.array(xs, np.float64).T]).astype(xs[0].dtype)


def total(method: Homomorphic, bucket: Bucket, xs: list[Arr], ops: Ops = NUMPY) -> Arr:
    """The sum that the method gives, which is the same on all ranks; and the gradients are left as they were."""
    results = lockstep(
        ops, method, bucket, [x.copy() for x in xs], [method.init(ops, bucket, World(0, len(xs))) for _ in xs]
    )
    totals = [np.asarray(result.total) for result in results]
    for other in totals:
        assert other.dtype == bucket.dtype and other.tobytes() == totals[0].tobytes()
    assert all(result.state == (1,) for result in results)
    return totals[0]


def rounds(method: Homomorphic, bucket: Bucket, xs: list[Arr], ops: Ops = NUMPY) -> list[tuple[str, int]]:
    """The dtypes and sizes of what is sent."""
    sent: list[tuple[str, int]] = []
    states = [method.init(ops, bucket, World(0, len(xs))) for _ in xs]
    lockstep(ops, method, bucket, xs, states, lambda m: sent.append((m.array.dtype.name, m.array.size)))
    return sent


@pytest.mark.parametrize("ranks", [1, 2, 3, *(pytest.param(more, marks=pytest.mark.long) for more in range(4, 9))])
@pytest.mark.parametrize("numel", [1, 20, 1000, pytest.param(5000, marks=pytest.mark.slow)])
def test_sums_are_exact_at_full_load(numel: int, ranks: int) -> None:
    bucket, method = bucket_of((numel,)), Homomorphic(density=0.05)
    keys = max(1, round(0.05 * numel))
    for seed in range(20):
        xs = sparse(bucket, ranks, keys, seed)
        assert rounds(method, bucket, [x.copy() for x in xs])[-1][0] == "int64"  # it was no dense exchange
        np.testing.assert_array_equal(total(method, bucket, xs), exact(xs))


@pytest.mark.slow
def test_sums_are_exact_at_a_realistic_size() -> None:
    bucket, method = bucket_of((1000, 1000)), Homomorphic()
    xs = sparse(bucket, 3, 50_000)
    assert rounds(method, bucket, [x.copy() for x in xs])[-1] == ("int64", method.sketch(bucket, 3).cells)
    np.testing.assert_array_equal(total(method, bucket, xs), exact(xs))


def test_cancelling_sums_are_exact() -> None:
    """Large values that cancel leave a small one, which a sum of floats would lose."""
    bucket = bucket_of((100,))
    xs = [np.zeros(100, np.float32) for _ in range(3)]
    for x, value in zip(xs, [2.0**20, 2.0**-8, -(2.0**20)], strict=True):
        x[7] = value
    assert xs[0][7] + xs[1][7] + xs[2][7] == 0
    assert total(Homomorphic(), bucket, xs)[7] == 2.0**-8


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bounds_of_exactness(dtype: str, ranks: int) -> None:
    """float32 values of ``2**(24-b) m`` or more are exact; others are off by ``2**-b m`` at most on each rank."""
    bucket, method, bits = bucket_of((2000,), dtype=dtype), Homomorphic(), 57 - math.ceil(math.log2(ranks))
    assert method.sketch(bucket, ranks).bits == bits
    xs = sparse(bucket, ranks, 100, spread=6.0)
    m = np.max(np.abs(xs))
    error = np.abs(total(method, bucket, xs) - exact(xs))
    rounding = np.spacing(np.abs(exact(xs)))
    assert (error <= ranks * 2.0**-bits * m + rounding).all()
    if dtype == "float32":
        present = np.where(np.array(xs) == 0, np.inf, np.abs(xs))
        large = present.min(axis=0) >= 2.0 ** (24 - bits) * m
        assert 10 < np.sum(large & np.any(xs, axis=0)) < 100
        assert (error[large] == 0).all() and (ranks > 1 or (error[~large] > 0).any())


@pytest.mark.parametrize("load", [0.75, 0.8])
def test_no_cell_can_overflow(load: float) -> None:
    """All ranks and keys at full scale and of one sign: the sums stay below 2**62 in the fullest cell."""
    ranks, bucket = 5, bucket_of((40_000,))
    method = Homomorphic(load=load)
    sketch = method.sketch(bucket, ranks)
    union = np.zeros(bucket.numel, np.uint8)
    union[np.random.default_rng(0).permutation(bucket.numel)[: sketch.capacity]] = 1
    key, peak = np.array([sketch.rehearse(union, np.arange(8))]), np.array([1.999], np.float32)
    sums = sketch.write(union, key, peak, union * peak[0])
    assert key[0] >= 0 and sums.min() >= 0
    assert sums.max() / (1.999 * 2.0 ** (sketch.bits - 1)) > 6  # some cell is shared by many
    assert int(sums.max()) * ranks <= 2**62
    assert 2**sketches.CROWD * ranks * 2**sketch.bits <= 2**62
    np.testing.assert_array_equal(sketch.read(union, key, peak, sums * ranks), union * np.float32(1.999) * 5)


def test_crowded_cells_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, xs = bucket_of((4000,)), sparse(bucket_of((4000,)), 2, 200)
    assert rounds(Homomorphic(), bucket, [x.copy() for x in xs])[-1][0] == "int64"
    monkeypatch.setattr(sketches, "CROWD", 1)
    assert rounds(Homomorphic(), bucket, [x.copy() for x in xs])[-1][0] == "float32"


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_denser_gradients_are_sent_as_they_are(framework: str, ranks: int) -> None:
    bucket, method = bucket_of((1000,)), Homomorphic(density=0.05)
    for keys, last in [(50, "int64"), (51, "float32"), (1000, "float32")]:
        xs = sparse(bucket, ranks, keys)
        sent = rounds(method, bucket, [x.copy() for x in xs])
        assert sent[-1][0] == last and len(sent) == (4 if last == "int64" else 3)
        np.testing.assert_allclose(total(method, bucket, xs, ops_of(framework)), exact(xs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_where_no_hash_will_do_the_gradient_is_sent_as_it_is(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here there is a single one, and coordinates that it fails for."""
    monkeypatch.setattr(homomorphic, "ATTEMPTS", 1)
    bucket = bucket_of((1000,))
    tried = ((seed, rounds(Homomorphic(), bucket, sparse(bucket, 3, 50, seed))[-1][0]) for seed in range(1000))
    xs = sparse(bucket, 3, 50, next(seed for seed, last in tried if last == "float32"))
    sent = rounds(Homomorphic(), bucket, [x.copy() for x in xs], ops_of(framework))
    assert sent[-1] == ("float32", 1000)
    np.testing.assert_allclose(total(Homomorphic(), bucket, xs, ops_of(framework)), exact(xs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keys", [1, 5, 20, 50, 100, pytest.param(1000, marks=pytest.mark.slow)])
def test_hashes_seldom_fail(keys: int) -> None:
    """Single hashes fail in less than 8% of the cases at full load, so eight of them in less than 2e-9."""
    bucket = bucket_of((20 * keys,))
    sketch, rng = Homomorphic().sketch(bucket, 2), np.random.default_rng(0)
    assert sketch.capacity == keys
    failed = 0
    for seed in range(400):
        union = np.zeros(bucket.numel, np.uint8)
        union[rng.permutation(bucket.numel)[:keys]] = 1
        failed += sketch.rehearse(union, np.array([seed])) < 0
    assert failed < 0.08 * 400


def test_a_failing_hash_is_followed_by_the_next() -> None:
    bucket = bucket_of((1000,))
    sketch, rng = Homomorphic().sketch(bucket, 2), np.random.default_rng(0)
    keys = np.arange(8)
    while True:
        union = np.zeros(bucket.numel, np.uint8)
        union[rng.permutation(bucket.numel)[:50]] = 1
        if sketch.rehearse(union, keys[:1]) < 0:
            break
    assert sketch.rehearse(union, keys) > 0


def test_hashes_differ_from_step_to_step() -> None:
    bucket, xs = bucket_of((2000,)), sparse(bucket_of((2000,)), 1, 50)

    def sketches(method: Homomorphic, bucket: Bucket, steps: int) -> list[Arr]:
        sent: list[Arr] = []
        state = method.init(NUMPY, bucket, World(0, 1))
        for _ in range(steps):
            (result,) = lockstep(NUMPY, method, bucket, [xs[0].copy()], [state], lambda m: sent.append(m.array))
            state = result.state
        return [array for array in sent if array.dtype == np.int64]

    first, second = sketches(Homomorphic(), bucket, 2)
    (other_seed,) = sketches(Homomorphic(seed=1), bucket, 1)
    (other_bucket,) = sketches(Homomorphic(), bucket._replace(key="b1"), 1)
    for other in (second, other_seed, other_bucket):
        assert (first != other).mean() > 0.5
    np.testing.assert_array_equal(sketches(Homomorphic(), bucket, 1)[0], first)


def test_three_cells_of_each_key() -> None:
    """One in each table, and all of them as likely."""
    sketch = sketches.Sketch(1, 50, 57, "float32")
    places = sketch._places(np.arange(50_000), mix_seed(3))
    np.testing.assert_array_equal(places // 50, np.broadcast_to([0, 1, 2], places.shape))
    hits = np.bincount(places.ravel(), minlength=150)
    assert abs(np.sum((hits - 1000) ** 2) / 1000 - 147) < 5 * (2 * 147) ** 0.5  # chi-squared, 147 degrees of freedom


def test_bytes_sent() -> None:
    """2000 coordinates, 100 keys, 2 ranks: the bitmap, half of the merged one, one number, and the sketch."""
    world = LocalWorld(Homomorphic(density=0.05, load=0.75), size=2)
    world.step(sparse(bucket_of((2000,)), 2, 100))
    cells = 3 * (math.ceil(100 / 0.75 / 3) + 8)
    assert (world.bytes_sent, world.rounds) == (250 + 125 + 4 + 8 * cells, 4)
    world.step(normal(bucket_of((2000,)), 2))
    assert (world.bytes_sent, world.rounds) == (2 * (250 + 125) + 4 + 8 * cells + 4 * 2000, 7)


def test_which_shapes_it_compresses() -> None:
    assert Homomorphic().compresses((1000, 100)) and Homomorphic(density=0.3).compresses((1000, 100))
    assert not Homomorphic().compresses((40,)) and not Homomorphic(density=0.4).compresses((1000, 100))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_extreme_gradients(framework: str, dtype: str) -> None:
    ops, bucket, limits = ops_of(framework), bucket_of((100,), dtype=dtype), np.finfo(dtype)
    for values in ([limits.max], [-limits.max, limits.tiny], [limits.tiny], [1.0, limits.tiny], [-0.0], []):
        x = np.zeros(100, dtype)
        x[: len(values)] = values
        largest = np.abs(x).max()
        np.testing.assert_allclose(total(Homomorphic(), bucket, [x], ops), x, rtol=0, atol=largest * 2.0**-57)
        summed = total(Homomorphic(), bucket, [x, -x, x], ops)
        np.testing.assert_allclose(summed, x, rtol=0, atol=largest * 2.0**-53)
    constant = np.full(100, 3.0, dtype)
    np.testing.assert_array_equal(total(Homomorphic(), bucket, [constant] * 2, ops), 2 * constant)
    np.testing.assert_array_equal(total(Homomorphic(density=1.0), bucket, [constant] * 2, ops), 2 * constant)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_denormal_sums_are_exact(dtype: str, framework: str) -> None:
    bucket, rng = bucket_of((1000,), dtype=dtype), np.random.default_rng(0)
    xs = [np.zeros(1000, dtype) for _ in range(3)]
    for x in xs:
        x[:40] = rng.integers(-(2**20), 2**20, 40) * np.finfo(dtype).smallest_subnormal
    np.testing.assert_array_equal(total(Homomorphic(), bucket, xs, ops_of(framework)), xs[0] + xs[1] + xs[2])


def test_minus_zero_is_zero() -> None:
    xs = [np.full(1000, -0.0, np.float32) for _ in range(2)]
    assert rounds(Homomorphic(), bucket_of((1000,)), xs)[-1][0] == "int64"


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("framework", COMPILED)
def test_frameworks_agree_bit_for_bit(framework: str, ranks: int) -> None:
    bucket, method, ops = bucket_of((3000,)), Homomorphic(), ops_of(framework)
    mine, theirs = (
        [method.init(NUMPY, bucket, World(0, ranks))] * ranks,
        [method.init(ops, bucket, World(0, ranks))] * ranks,
    )
    for step in range(3):
        xs = sparse(bucket, ranks, 150, seed=step)
        expected = lockstep(NUMPY, method, bucket, [x.copy() for x in xs], mine)
        results = lockstep(ops, method, bucket, [x.copy() for x in xs], theirs)
        mine, theirs = [result.state for result in expected], [result.state for result in results]
        assert np.asarray(results[0].total).tobytes() == expected[0].total.tobytes()


def test_the_bitmap_is_merged_by_or() -> None:
    """What two ranks ask for, and what the server of the first half makes of it."""
    bucket, method, (x, y) = bucket_of((16,)), Homomorphic(density=0.2), np.zeros((2, 16), np.float32)
    x[[1, 2]], y[[2, 5]] = 1, 2
    message = next(method.exchange(NUMPY, bucket, x, method.init(NUMPY, bucket, World(0, 2)), World(0, 2)))
    assert isinstance(message, SaturatingSum) and (message.bits, message.zero) == (1, 0)
    np.testing.assert_array_equal(unpack(NUMPY, message.array, 1, 16), x != 0)
    sent: list[Arr] = []
    lockstep(
        NUMPY, method, bucket, [x, y], [method.init(NUMPY, bucket, World(0, 2))] * 2, lambda m: sent.append(m.array)
    )
    union = NUMPY.concat([sent[1], np.zeros(1, np.uint8)])
    assert set(np.flatnonzero(unpack(NUMPY, union, 1, 16))) == {2}  # the first byte holds the even coordinates


@pytest.mark.parametrize(
    "wrong", [{"density": 0.0}, {"density": 1.1}, {"load": 0.0}, {"load": 0.81}, {"seed": -1}, {"seed": 2**32}]
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(wrong))):
        Homomorphic(**wrong)


def test_there_is_nothing_to_feed_back() -> None:
    assert not Homomorphic().supports_feedback and not Homomorphic.feedback
