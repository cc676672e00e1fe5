"""THC: sums never wrap, rotations invert, and the options do what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from worlds import FRAMEWORKS, Arr, bucket_of, normal, ops_of

from hvd_compress.core.collectives import AllReduce, SaturatingSum, World
from hvd_compress.errors import SpecError
from hvd_compress.methods.thc import TABLES, THC
from hvd_compress.ops.lanes import lanes_of, pack_lanes, unpack_lanes, width_of
from hvd_compress.ops.rotation import hadamard, signs
from hvd_compress.transport.lockstep import lockstep

NUMPY = ops_of("numpy")


def total(method: THC, xs: list[Arr]) -> Arr:
    bucket = bucket_of(xs[0].shape, dtype=xs[0].dtype.name)
    states = [method.init(NUMPY, bucket, World(0, len(xs))) for _ in xs]
    result: Arr = lockstep(NUMPY, method, bucket, [x.copy() for x in xs], states)[0].total
    return result


@pytest.mark.parametrize(
    ("bits", "levels"), [(2, "uniform"), (4, "uniform"), (8, "uniform"), (3, "table"), (4, "table")]
)
def test_sums_never_wrap(bits: int, levels: str) -> None:
    """All ranks at full scale, in every lane, in both directions and mixed: the packed sum is the true sum."""
    top = THC(bits=bits, levels=levels).top
    for ranks in range(2, 65):
        width = width_of(top * ranks)
        y = np.random.default_rng(ranks).choice([-top, 0, top], 1000).astype(np.int32)
        y[:64], y[64:128] = top, -top
        exact = pack_lanes(NUMPY, y, width).astype(np.int64) * ranks
        assert np.abs(exact).max() < 2**31
        np.testing.assert_array_equal(unpack_lanes(NUMPY, exact.astype(np.int32), width, 1000), y * ranks)


def test_lanes_are_as_narrow_as_can_be() -> None:
    """A sum within +-s needs 2 s + 1 values, and a signed lane of w bits has 2^w - 1 that are balanced."""
    for largest in range(1, 500):
        width = width_of(largest)
        assert 2**width - 1 >= 2 * largest + 1 > 2 ** (width - 1) - 1
    assert [lanes_of(width) for width in (5, 6, 8, 11, 17)] == [6, 5, 4, 2, 1]


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_whole_exchanges_at_full_scale(ranks: int) -> None:
    """Equal gradients on all ranks, as large as the range: nothing cancels."""
    x = np.where(np.arange(1024) % 3, 5.0, -5.0)
    result = total(THC(rotation="none", clip=0), [x] * ranks)
    np.testing.assert_allclose(result, x * ranks, rtol=1e-12)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("size", [1, 2, 32, 64, 1024, 4096])
def test_hadamard(framework: str, size: int) -> None:
    """Orthogonal, its own inverse, and that of the definition: (-1)^popcount(i & j) / sqrt(n)."""
    ops = ops_of(framework)
    x = np.random.default_rng(0).standard_normal((3, size))
    y = np.asarray(hadamard(ops, ops.constant(x)))
    np.testing.assert_allclose(np.asarray(hadamard(ops, ops.constant(y))), x, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(y, axis=1), np.linalg.norm(x, axis=1))
    if size <= 64:
        sign = [[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)]
        np.testing.assert_allclose(y, x @ np.array(sign) / np.sqrt(size), atol=1e-12)


def test_signs_are_fair_and_shared() -> None:
    rows = np.zeros((4, 4096))
    drawn = signs(NUMPY, NUMPY.seed(1), rows)
    assert set(np.unique(drawn)) == {-1, 1} and abs(drawn.mean()) < 5 / drawn.size**0.5
    np.testing.assert_array_equal(
        drawn, np.asarray(signs(ops_of("torch"), ops_of("torch").seed(1), ops_of("torch").constant(rows)))
    )


def test_rotation_tames_outliers() -> None:
    """One huge coordinate in each block spoils the range of its block, unless it is spread."""
    x = np.random.default_rng(0).standard_normal(4096)
    x[::512] = 300.0
    errors = {
        rotation: np.linalg.norm(total(THC(bits=8, rotation=rotation, block=256), [x, x])[1::2] - 2 * x[1::2])
        for rotation in ("none", "partial", "full")
    }
    assert max(errors["partial"], errors["full"]) < 0.4 * errors["none"]


def test_a_full_rotation_wastes_little() -> None:
    for n in (1, 7, 1000, 5000, 2**16 + 1, 10**6):
        columns = THC(rotation="full").columns(n)
        assert -n % columns <= n / 8
        assert columns & columns - 1 == 0
    assert THC(rotation="full").columns(2**16) == 2**16


@pytest.mark.parametrize("bits", TABLES)
def test_table_levels(bits: int) -> None:
    """Only the table's integers are sent, and their mean is the number that was rounded."""
    method, table = THC(bits=bits, levels="table"), np.array(TABLES[bits]) - TABLES[bits][-1] / 2
    x = np.linspace(-1, 1, 201)
    y = method.round(NUMPY, np.repeat(x, 1000).reshape(201, 1000), np.ones(1), NUMPY.seed(1))
    assert set(np.unique(y)) == set(table)
    steps = np.diff(table).max()
    np.testing.assert_allclose(y.mean(axis=1), x * method.top, atol=4 * steps / 2 / 1000**0.5)


def test_clipping_is_as_rare_as_stated() -> None:
    """With clip=1/32, about that share of the rotated coordinates lies beyond the range."""
    (x,) = normal(bucket_of((2**16,), dtype="float64"), 1)
    for clip in (1 / 32, 1 / 256):
        method = THC(rotation="full", clip=clip)
        rows = hadamard(NUMPY, x.reshape(1, -1) * signs(NUMPY, 5, x.reshape(1, -1)))
        beyond = (np.abs(rows) > method._range(NUMPY, rows)).mean()
        assert abs(beyond - clip) < 5 * (clip / x.size) ** 0.5


def messages(method: THC, n: int, ranks: int) -> list[Any]:
    """What one rank asks for, as the others would answer with zeros."""
    bucket = bucket_of((n,))
    exchanging = method.exchange(
        NUMPY, bucket, np.ones(n, np.float32), method.init(NUMPY, bucket, World(0, ranks)), World(0, ranks)
    )
    asked: list[Any] = [next(exchanging)]
    asked.append(exchanging.send(asked[0].array))
    return asked


def test_what_is_asked_for() -> None:
    largest, summed = messages(THC(), 1024, 4)
    assert largest == AllReduce(largest.array, op="max") and largest.array.shape == (1,)
    assert isinstance(summed, AllReduce) and summed.array.dtype == np.int32 and summed.array.shape == (205,)
    _, saturating = messages(THC(overflow="saturate"), 1024, 4)
    assert saturating == SaturatingSum(saturating.array, bits=4, zero=7) and saturating.array.shape == (512,)


@pytest.mark.parametrize("ranks", [2, 5])
def test_saturation_clips_the_sum(ranks: int) -> None:
    """Equal gradients at full range add up to n times the range; with no headroom only one range is left of it.

    The codes go one further up than down: -7 .. 8 with 4 bits.
    """
    x = np.where(np.arange(256) % 2, 1.0, -1.0)
    clipped = total(THC(rotation="none", overflow="saturate", headroom=0, clip=0), [x] * ranks)
    np.testing.assert_allclose(clipped, np.where(x > 0, min(ranks, 8 / 7), -1.0), rtol=1e-12)
    np.testing.assert_allclose(
        total(THC(rotation="none", overflow="saturate", headroom=1, bits=8, clip=0), [x] * ranks), x * ranks, rtol=0.03
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"bits": 5}, "bits=5 is not allowed"),
        ({"rotation": "half"}, "rotation='half' is not allowed"),
        ({"block": 1000}, "block=1000 is not allowed: block must be a power of two"),
        ({"levels": "odd"}, "levels='odd' is not allowed"),
        ({"overflow": "wrap"}, "overflow='wrap' is not allowed"),
        ({"clip": 1.0}, "clip=1.0 is not allowed"),
        ({"headroom": 2.0}, "headroom=2.0 is not allowed"),
        ({"levels": "table", "bits": 8}, "levels=table requires"),
        ({"levels": "table", "overflow": "saturate"}, "levels=table requires"),
        ({"overflow": "saturate", "bits": 3}, "overflow=saturate requires bits=2, 4 or 8"),
    ],
)
def test_bad_parameters(params: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        THC(**params)
