"""The other kernels for CPUs give what the plain version gives."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress.ops.code import Code
from hvd_compress.ops.kernels import cpu
from hvd_compress.ops.kernels.cpu.casts import from_bfloat16
from hvd_compress.ops.lanes import lanes_of
from hvd_compress.ops.numpy import NumpyOps

ORACLE = NumpyOps()
SIZES = (1, 7, 63, 64, 65, 511, 512, 513, 1000, 8193, 100_003)

Floats = npt.NDArray[np.float32]


def normal(n: int, seed: int = 0) -> Floats:
    """Normal numbers that may not be written."""
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    x.flags.writeable = False
    return x


def tied(n: int, seed: int = 0) -> Floats:
    """Numbers of which many have the same magnitude, zeros of both signs among them."""
    x: Floats = np.round(normal(n, seed) * 3) / 3
    x[::5] *= -0.0
    x[:: max(n // 3, 1)] = 1e30
    x[1 :: max(n // 4, 2)] = 1e-42
    return x


@pytest.mark.parametrize(("width", "top"), [(32, 7), (16, 100), (10, 5), (8, 40), (5, 3), (4, 2), (2, 1)])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (1, 513), (5, 512), (9, 1000), (700, 3), (2, 50_001)])
def test_lanes(rows: int, columns: int, width: int, top: int) -> None:
    x = normal(rows * columns).reshape(rows, columns)
    for limits in (np.array([1.5], np.float32), np.linspace(0, 2, rows).astype(np.float32)):
        want = ORACLE.to_lanes(x, limits, top, width, 7)
        mine = cpu.to_lanes(x, limits, top, width, 7)
        assert mine.dtype == np.int32 and mine.shape == want.shape
        np.testing.assert_array_equal(mine, want)
        total = mine + cpu.to_lanes(normal(rows * columns, 1).reshape(rows, columns), limits, top, width, 8)
        if 2 * top < 2 ** (width - 1):
            read = ORACLE.from_lanes(total, limits, top, width, rows, columns)
            np.testing.assert_array_equal(cpu.from_lanes(total, limits, top, width, rows, columns), read)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 4, 5, 8, 10, 16]), st.integers(1, 600))
def test_lanes_at_their_limits(seed: int, width: int, n: int) -> None:
    most = 2 ** (width - 1) - 1
    rng = np.random.default_rng(seed)
    packed = np.zeros(-(-n // lanes_of(width)), np.int64)
    for lane in range(lanes_of(width)):
        packed += rng.choice([-most, 0, most], packed.size) * 2 ** (width * lane)
    limits = np.ones(1, np.float32)
    want = ORACLE.from_lanes(packed.astype(np.int32), limits, most, width, 1, n)
    np.testing.assert_array_equal(cpu.from_lanes(packed.astype(np.int32), limits, most, width, 1, n), want)


@pytest.mark.parametrize("block", [1, 2, 4, 8, 16, 64, 256, 1024, 2048, 4096, 8192, 2**17])
@pytest.mark.parametrize("n", [1, 7, 1024, 5000, 100_003])
def test_rotations(n: int, block: int) -> None:
    x = normal(n)
    want = ORACLE.rotate(x, 3, block)
    mine = cpu.rotate(x, 3, block)
    assert mine.shape == want.shape
    np.testing.assert_allclose(mine, want, atol=3e-6)
    back = cpu.unrotate(mine, 3)
    np.testing.assert_allclose(back[:n], x, atol=3e-6)
    assert np.abs(back[n:]).max(initial=0) < 3e-6
    np.testing.assert_array_equal(cpu.unrotate(mine, 3, out=mine), back)  # in place
    whole = np.zeros(want.size, np.float32)
    whole[:n] = x
    np.testing.assert_array_equal(cpu.rotate(whole, 3, block, out=whole), cpu.rotate(x, 3, block))


def test_rotations_have_the_signs_of_the_oracle() -> None:
    one = np.zeros(4096, np.float32)
    one[5] = 1
    np.testing.assert_allclose(cpu.rotate(one, 11, 1024), ORACLE.rotate(one, 11, 1024), rtol=1e-6)


def test_norms() -> None:
    rows = np.concatenate([normal(50_000), np.full(1000, 1e30), np.full(1000, 1e-42), np.zeros(1000)])
    rows = rows.astype(np.float32).reshape(-1, 1000)
    rows.flags.writeable = False
    np.testing.assert_allclose(cpu.norms(rows), ORACLE.norms(rows), rtol=1e-6)
    np.testing.assert_allclose(cpu.norms(rows.reshape(-1, 4)), ORACLE.norms(rows.reshape(-1, 4)), rtol=1e-6)
    assert cpu.norms(np.zeros((0, 4), np.float32)).shape == (0,)


@pytest.mark.parametrize("n", SIZES)
def test_largest_magnitudes(n: int) -> None:
    for x in (normal(n), tied(n), -normal(n)):
        for rows in (x, x.reshape(1, n), x.reshape(n, 1), np.stack([x, x[::-1], x / 3])):
            mine = cpu.absmax(rows)
            assert mine.dtype == np.float32
            np.testing.assert_array_equal(mine, ORACLE.absmax(rows), strict=True)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_largest_magnitudes_of_what_is_not_finite(bad: float) -> None:
    x = normal(1000).reshape(2, 500).copy()
    x[1, 77] = bad
    np.testing.assert_array_equal(cpu.absmax(x), ORACLE.absmax(x))
    assert np.isfinite(cpu.absmax(x)).tolist() == [True, False]


@pytest.mark.parametrize("n", SIZES)
def test_tails(n: int) -> None:
    for x in (normal(n), tied(n)):
        unit = float(np.abs(x).max())
        for threshold in (1e-300, 1e-3, 0.3, 1.0, 2.0):
            want = ORACLE.tail(x, np.float64(unit), np.float64(threshold), True)
            np.testing.assert_allclose(cpu.tail(x, unit, threshold, True), want, rtol=1e-10, atol=1e-10)
            np.testing.assert_allclose(cpu.tail(x, unit, threshold)[:3], want[:3], rtol=1e-10)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_momentum(n: int, nesterov: bool) -> None:
    x, velocity, residual = normal(n, 1), normal(n, 2), normal(n, 3)
    fast, piled = ORACLE.accelerate(x, velocity, residual, 0.9, nesterov)
    mine = cpu.accelerate(x, velocity, residual, 0.9, nesterov)
    np.testing.assert_array_equal(mine[0], fast)
    np.testing.assert_array_equal(mine[1], piled)
    place = x.copy()
    _, out = cpu.accelerate(place, velocity, residual, 0.9, nesterov, out=place)
    assert out is place
    np.testing.assert_array_equal(place, piled)


@pytest.mark.parametrize("n", [*SIZES, pytest.param(300_000, marks=pytest.mark.slow)])
def test_the_largest_and_ties_go_to_the_lower_index(n: int) -> None:
    for x in (normal(n), tied(n), np.zeros(n, np.float32), np.full(n, -2.0, np.float32)):
        for k in {0, 1, n // 1000, n // 100, n // 3, n - 1, n}:
            mine = cpu.top_indices(x, k)
            assert mine.dtype == np.int64
            np.testing.assert_array_equal(mine, ORACLE.top_indices(x, k))
            if k:
                assert cpu.kth_magnitude(x, k) == ORACLE.kth_magnitude(x, k)


def test_the_largest_are_found_wherever_they_are() -> None:
    """A sample that misses all of them is no harm, nor is one that has seen too many."""
    n = 500_000
    for where in (slice(1000, 1400), slice(0, n, 7), slice(n - 3000, n)):
        x = np.full(n, 1e-3, np.float32)
        x[where] = np.linspace(1, 2, len(range(*where.indices(n))))
        for k in (1, 399, 5000):
            np.testing.assert_array_equal(cpu.top_indices(x, k), ORACLE.top_indices(x, k))


@settings(max_examples=40)
@given(st.integers(1, 700), st.integers(0, 2**32 - 1), st.sampled_from([1, 3, 1000]), st.floats(0, 1))
def test_the_largest_of_few_values(n: int, seed: int, values: int, share: float) -> None:
    x = np.random.default_rng(seed).integers(-values, values, n, endpoint=True).astype(np.float32)
    k = round(share * n)
    np.testing.assert_array_equal(cpu.top_indices(x, k), ORACLE.top_indices(x, k))


@pytest.mark.parametrize(
    "threshold", [-1.0, -0.0, 0.0, 1e-45, 0.5, 1 / 3, np.float64(0.7), np.float32(1e30), np.inf, np.nan]
)
def test_what_is_not_below_a_threshold(threshold: float) -> None:
    for n in (0, *SIZES):
        for x in (normal(n), tied(n), normal(n + 1)[1:]):
            np.testing.assert_array_equal(cpu.above(x, threshold), ORACLE.above(x, threshold))


def test_additions_at_indices() -> None:
    total, indices, values = normal(10_000).copy(), np.arange(3, 10_000, 7), normal(1429)
    indices.flags.writeable = False
    want = ORACLE.add_at(total.copy(), indices, values)
    assert cpu.add_at(total, indices, values) is total
    np.testing.assert_array_equal(total, want)
    for bad in (-1, 10_000, 2**40):
        with pytest.raises(IndexError, match=r"0 \.\. 9999"):
            cpu.add_at(total, np.array([bad]), normal(1))


@pytest.mark.parametrize(
    ("indices", "yes"),
    [
        ([], True),
        ([0], True),
        ([9], True),
        ([10], False),
        ([-1], False),
        ([0, 1, 9], True),
        ([0, 0], False),
        ([1, 0], False),
        ([-1, 3], False),
        ([3, 10], False),
        ([2**62, 3], False),
    ],
)
def test_whether_indices_ascend(indices: list[int], yes: bool) -> None:
    assert cpu.ascending(np.array(indices, np.int64), 10) is yes


def test_one_pair_out_of_order_is_seen_wherever_it_is() -> None:
    for place in (0, 1, 31, 64, 998):
        indices = np.arange(1000)
        indices[place] = indices[place + 1]
        assert not cpu.ascending(indices, 1000)
    assert cpu.ascending(np.arange(1000), 1000)


@pytest.mark.parametrize("n", [0, *SIZES])
def test_copies_tell_whether_all_is_finite(n: int) -> None:
    x, out = normal(n), np.full(n, np.nan, np.float32)
    assert cpu.put_finite(out, x) is True
    np.testing.assert_array_equal(out, x)
    for broken in broken_ones(x):
        assert cpu.put_finite(out, broken) is False
        assert not out.any()
        out.fill(1)


def broken_ones(x: npt.NDArray[np.float32]) -> Iterator[npt.NDArray[np.float32]]:
    """Copies with one number that is not finite."""
    for place in {0, x.size // 2, x.size - 1} if x.size else ():
        for bad in (np.inf, -np.inf, np.nan):
            broken = x.copy()
            broken[place] = bad
            yield broken


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("n", [0, *SIZES])
def test_a_gradient_is_added_to_a_residual_elsewhere(n: int, scale: float) -> None:
    residual, grad, out = normal(n), normal(n, 1), normal(n, 2)
    kept, came = residual.copy(), grad.copy()
    assert absorb(out, residual, grad, scale) is True
    np.testing.assert_array_equal(out, kept + came / np.float32(scale))
    for broken in broken_ones(grad):
        assert absorb(out, residual, broken, scale) is False
        np.testing.assert_array_equal(out, kept)
    np.testing.assert_array_equal(residual, kept)
    np.testing.assert_array_equal(grad, came)


def absorb(out: Floats, residual: Floats, grad: Floats, scale: float) -> bool:
    return cpu.absorb_at(out.ctypes.data, residual.ctypes.data, grad.ctypes.data, grad.size, scale)


def test_what_leaves_the_range_by_its_scale_is_not_absorbed() -> None:
    residual, grad, out = normal(9), np.full(9, 3e38, np.float32), np.zeros(9, np.float32)
    assert not absorb(out, residual, grad, 0.5)
    np.testing.assert_array_equal(out, residual)


def test_pieces_of_a_sum_are_delivered_to_their_places() -> None:
    total, outs = normal(5000).copy(), [np.zeros(n, np.float32) for n in (1000, 1, 0, 3000)]
    starts, sizes = np.array([100, 4999, 7, 1500]), np.array([out.size for out in outs])
    places = np.array([out.ctypes.data for out in outs])
    assert cpu.deliver(total, starts, places, sizes, 1 / 3) is True
    for start, out in zip(starts, outs, strict=True):
        np.testing.assert_array_equal(out, total[start : start + out.size] * np.float32(1 / 3))
    for value, factor in ((np.nan, 1.0), (np.inf, 1.0), (3e38, 2.0)):
        total[4999] = value
        assert cpu.deliver(total, starts, places, sizes, factor) is False


def test_bfloat16_of_all_kinds_of_numbers() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 300_000, dtype=np.uint32)
    edges = np.arange(0, 2**16, dtype=np.uint32)
    near = np.concatenate([(edges << np.uint32(16)) + np.uint32(add) for add in (0, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    x = np.concatenate([bits, near]).view(np.float32)
    x = x[np.isfinite(x)]
    code = Code("bfloat16", 16)
    np.testing.assert_array_equal(cpu.quantise(x, code, 0, None), ORACLE.quantise(x, code)[0])
    np.testing.assert_array_equal(from_bfloat16(edges.astype(np.uint16)).view(np.uint32), edges << np.uint32(16))
