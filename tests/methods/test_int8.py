"""Int8 lanes: sums are exact integers and can never wrap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import FRAMEWORKS, bucket_of, normal, ops_of

from hvd_compress.core.collectives import AllReduce, World
from hvd_compress.errors import UnsupportedError
from hvd_compress.methods.int8 import Int8
from hvd_compress.methods.wrappers.error_feedback import ErrorFeedback
from hvd_compress.ops.lanes import pack_lanes, unpack_lanes
from hvd_compress.transport.lockstep import lockstep

NUMPY = ops_of("numpy")


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64, 127])
def test_extreme_sums_never_wrap(bits: int, ranks: int) -> None:
    """All ranks at full scale, in every pattern of signs over the lanes: the packed int32 sum is the true sum."""
    method = Int8(bits=bits)
    levels, lanes = method.levels(ranks), 32 // bits
    signs = np.array(np.meshgrid(*[[-1, 0, 1]] * lanes)).reshape(lanes, -1).astype(np.int32)
    y = signs * levels
    packed = pack_lanes(NUMPY, y, bits)
    assert packed.dtype == np.int32
    true = packed.astype(np.int64) * ranks
    assert np.abs(true).max() < 2**31
    np.testing.assert_array_equal(
        unpack_lanes(NUMPY, true.astype(np.int32), bits, y.size).reshape(lanes, -1), y * ranks
    )


@given(st.sampled_from([8, 16]), st.integers(1, 127), st.data())
def test_sums_of_any_digits_come_back(bits: int, ranks: int, data: st.DataObject) -> None:
    method = Int8(bits=bits)
    levels, lanes = method.levels(ranks), 32 // bits
    digits = st.lists(st.integers(-levels, levels), min_size=lanes, max_size=lanes)
    ys = np.array([data.draw(digits) for _ in range(min(ranks, 5))], np.int32)
    packed = sum((pack_lanes(NUMPY, y[:, None], bits) for y in ys), np.zeros(1, np.int32))
    np.testing.assert_array_equal(unpack_lanes(NUMPY, packed, bits, lanes), ys.sum(0))


def test_levels_leave_room_for_all_ranks() -> None:
    for ranks in range(1, 128):
        assert Int8().levels(ranks) * ranks <= 127


def test_too_many_ranks_are_refused_with_the_cure() -> None:
    with pytest.raises(UnsupportedError, match="cannot sum over 128 ranks: take int8:bits=16"):
        Int8().levels(128)
    assert Int8(bits=16).levels(128) == 255


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_only_int32_and_scales_travel(framework: str) -> None:
    ops, bucket, method = ops_of(framework), bucket_of((1000,)), Int8(block=64)
    (x,) = normal(bucket, 1)
    exchanging = method.exchange(ops, bucket, ops.constant(x), method.init(ops, bucket, World(0, 2)), World(0, 2))
    scales = next(exchanging)
    assert isinstance(scales, AllReduce) and scales.op == "max" and scales.array.shape == (16,)
    lanes = exchanging.send(scales.array)
    assert isinstance(lanes, AllReduce) and ops.dtype(lanes.array) == "int32" and lanes.array.shape == (256,)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_error_is_below_one_level(ranks: int) -> None:
    """Each rank rounds to a neighbouring level, so the sum is off by less than ``n m / L`` in each block."""
    bucket, method = bucket_of((1000,)), Int8(block=50 * 4)
    xs = normal(bucket, ranks)
    total = lockstep(NUMPY, method, bucket, xs, [method.init(NUMPY, bucket, World(0, len(xs))) for _ in xs])[0].total
    peak = np.max(np.abs(xs), axis=0).reshape(5, 200).max(axis=1, keepdims=True)
    bound = np.broadcast_to(ranks * peak / method.levels(ranks), (5, 200)).ravel()
    error = np.abs(total - sum(xs))
    assert (error <= bound * 1.0001).all()
    assert error.max() > bound.max() * 0.2  # the bound is not far off


def test_ranks_round_independently() -> None:
    bucket, method = bucket_of((512,)), ErrorFeedback(Int8())
    x = np.full(512, 0.3, np.float32)
    x[0] = 1.0
    results = lockstep(NUMPY, method, bucket, [x, x], [method.init(NUMPY, bucket, World(0, 2))] * 2)
    first, second = (result.state.residual for result in results)
    assert (first != second).mean() > 0.1


def test_rounding_never_exceeds_the_largest_level() -> None:
    """Full scale plus noise just below 1 rounds up in float32, about once in 500,000 coordinates."""
    bucket, method = bucket_of((2**21,)), Int8()
    (result,) = lockstep(NUMPY, method, bucket, [np.ones(2**21, np.float32)], [method.init(NUMPY, bucket, World(0, 1))])
    assert (result.total == 1.0).all()
