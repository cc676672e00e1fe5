"""8-bit floats are those of PyTorch, and 8-bit integers those of the equation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from worlds import FRAMEWORKS, Arr, bucket_of, ops_of

from hvd_compress.core.collectives import World
from hvd_compress.core.method import Method
from hvd_compress.methods.block8 import Block8
from hvd_compress.methods.fp8 import FP8
from hvd_compress.ops.code import LARGEST, Code
from hvd_compress.ops.coding import TINY
from hvd_compress.transport.lockstep import lockstep

E4M3, E5M2 = FP8(format="e4m3"), FP8(format="e5m2")
FORMATS = [(E4M3, 448, torch.float8_e4m3fn), (E5M2, 57344, torch.float8_e5m2)]
EACH_FORMAT = pytest.mark.parametrize(("method", "largest", "dtype"), FORMATS, ids=["e4m3", "e5m2"])
EACH_FRAMEWORK = pytest.mark.parametrize("framework", FRAMEWORKS)


def encoded(framework: str, x: Arr, code: Code) -> tuple[Arr, Arr]:
    """Return the scales and the codes of an array."""
    ops = ops_of(framework)
    data = np.asarray(ops.quantise(ops.constant(x), code)[0])
    scales = -(-x.size // min(x.size, code.block)) * x.itemsize
    return data[:scales].view(x.dtype), data[scales:]


def decoded(framework: str, scale: float, codes: Arr, code: Code, dtype: str) -> Arr:
    """Return what the codes of one block stand for."""
    ops = ops_of(framework)
    data = np.concatenate([np.array([scale], dtype).view(np.uint8), codes])[None]
    return np.asarray(ops.dequantise(ops.constant(data), code, codes.size, dtype))


def nearest(x: Arr) -> Arr:
    return np.asarray(torch.from_numpy(x.astype(np.float32)).to(torch.float8_e4m3fn).float())


def total_of(method: Method, xs: list[Arr], framework: str) -> Arr:
    ops, bucket = ops_of(framework), bucket_of(xs[0].shape)
    states = [method.init(ops, bucket, World(0, len(xs))) for _ in xs]
    return np.asarray(lockstep(ops, method, bucket, xs, states)[0].total)


def all_float16() -> Arr:
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    return np.asarray(x[np.isfinite(x)], np.float32)


def random_float32() -> Arr:
    rng = np.random.default_rng(0)
    return np.asarray(rng.standard_normal(100_000) * 2.0 ** rng.integers(-40, 20, 100_000), np.float32)


@EACH_FRAMEWORK
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("values", [all_float16, random_float32])
@EACH_FORMAT
def test_the_codes_are_those_of_torch(
    method: FP8, largest: int, dtype: torch.dtype, values: Any, precision: str, framework: str
) -> None:
    """Beyond the largest number torch's cast gives nan or inf; here the scale makes the magnitude of a block that."""
    x = np.append(np.clip(values(), -largest, largest), largest).astype(precision)
    scales, codes = encoded(framework, x, method.code._replace(block=x.size))
    assert scales == largest
    expected = torch.from_numpy(x.astype(np.float32)).to(dtype)
    np.testing.assert_array_equal(codes, expected.view(torch.uint8).numpy())
    numbers = decoded(framework, largest, codes, method.code._replace(block=x.size), precision)
    np.testing.assert_array_equal(numbers, expected.to(torch.float64).numpy())


@EACH_FRAMEWORK
@EACH_FORMAT
def test_each_finite_code_stands_for_the_number_of_torch(
    method: FP8, largest: int, dtype: torch.dtype, framework: str
) -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(dtype).to(torch.float32).numpy()
    finite = np.isfinite(expected)
    assert (~finite).sum() == (2 if dtype is torch.float8_e4m3fn else 8)
    numbers = decoded(framework, largest, codes, method.code, "float32")
    np.testing.assert_array_equal(numbers[finite], expected[finite])
    assert np.isfinite(numbers).all()  # a damaged code, too


@EACH_FRAMEWORK
@EACH_FORMAT
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-36, 1.0, 1e38, 3.4e38])
def test_no_scale_overflows_or_makes_a_code_that_is_no_number(
    scale: float, stochastic: bool, method: FP8, largest: int, dtype: torch.dtype, framework: str
) -> None:
    x = np.asarray(np.random.default_rng(0).uniform(-1, 1, 3000) * scale, np.float32)
    ops, code = ops_of(framework), method.code._replace(dither=stochastic)
    _, codes = encoded(framework, x, code)
    assert torch.from_numpy(codes.copy()).view(dtype).float().isfinite().all()
    error = np.asarray(ops.quantise(ops.constant(x), code, return_error=True)[1])
    if scale <= TINY:
        np.testing.assert_array_equal(error, x)
    else:
        gap = {448: 32, 57344: 8192}[largest] / largest * scale  # of the largest numbers
        assert np.abs(error).max() <= gap * (1 if stochastic else 0.5) * 1.0001


@EACH_FRAMEWORK
@EACH_FORMAT
def test_stochastic_rounding_gives_a_neighbour_in_proportion_to_the_distance(
    method: FP8, largest: int, dtype: torch.dtype, framework: str
) -> None:
    """Numbers of the format stay what they are."""
    codes = np.arange(126 if largest == 448 else 123, dtype=np.uint8)
    numbers = torch.from_numpy(codes).view(dtype).double().numpy()
    gaps, draws = np.diff(numbers), 2000
    shares = np.random.default_rng(0).choice([0, 1 / 4, 1 / 2, 7 / 8], gaps.size)
    x = np.append(np.repeat(-numbers[:-1] - shares * gaps, draws), largest).astype(np.float32)
    ops, code = ops_of(framework), method.code._replace(dither=True, block=x.size)
    rounded = -np.asarray(ops.dequantise(ops.quantise(ops.constant(x), code, 3)[0][None], code, x.size, "float32"))
    ups = (rounded[:-1].reshape(gaps.size, draws) - numbers[:-1, None]) / gaps[:, None]
    assert set(np.unique(ups)) == {0, 1}
    assert (np.abs(ups.mean(axis=1) - shares) <= 5 * (shares * (1 - shares) / draws) ** 0.5).all()


@EACH_FRAMEWORK
@pytest.mark.parametrize("twoway", [True, False])
@pytest.mark.parametrize("method", [FP8, Block8])
def test_the_sum_is_that_of_decoded_gradients(method: Any, twoway: bool, framework: str) -> None:
    """Two-way, it is compressed once more: with one block per shard, here by powers of two only."""
    largest = {FP8: 448.0, Block8: 127.0}[method]
    xs = [np.asarray(np.random.default_rng(rank).integers(-3, 4, 128), np.float32) for rank in range(4)]
    for x in xs:
        x[::16] = largest
    total = total_of(method(block=16, twoway=twoway), xs, framework)
    exact = np.sum(xs, axis=0)
    if twoway:
        unit = exact.max() / largest
        near = np.floor(exact / unit + 0.5) * unit if method is Block8 else nearest(exact / unit) * unit
        np.testing.assert_array_equal(total, near)
    else:
        np.testing.assert_array_equal(total, exact)


@pytest.mark.parametrize(("spread", "better"), [(0.5, Block8()), (3.0, FP8())])
def test_floats_are_for_magnitudes_that_differ_and_integers_for_those_that_do_not(spread: float, better: Any) -> None:
    """Error of a coordinate relative to itself; with log-normal magnitudes."""
    rng = np.random.default_rng(0)
    x = np.asarray(np.exp(spread * rng.standard_normal(100_000)) * rng.choice([-1, 1], 100_000), np.float32)
    errors = {m.name: np.median(np.abs(total_of(m, [x.copy()], "numpy") / x - 1)) for m in (FP8(), Block8())}
    assert min(errors, key=errors.__getitem__) == better.name, errors


@EACH_FRAMEWORK
@EACH_FORMAT
def test_no_random_number_rounds_the_largest_up_to_a_code_that_is_no_number(
    method: FP8, largest: int, dtype: torch.dtype, framework: str
) -> None:
    """The product of this scale and its inverse is above 1, and some coordinate draws a random number below that."""
    scale, n = np.float32(1.0008855), 2**20
    assert scale * (np.float32(LARGEST) / scale) > LARGEST
    assert ops_of("numpy").uniform(0, n).min() < 2**-22
    ops = ops_of(framework)
    data = ops.quantise(ops.constant(np.full(n, scale)), method.code._replace(dither=True, block=n))[0]
    expected = torch.tensor([largest], dtype=torch.float32).to(dtype).view(torch.uint8)
    np.testing.assert_array_equal(np.asarray(data)[4:], int(expected))


def test_only_servers_that_round_to_nearest_keep_a_residual() -> None:
    ops, bucket = ops_of("numpy"), bucket_of((100,))
    kept = [
        method.init(ops, bucket, World(0, 2)).served
        for method in (FP8(), Block8(), FP8(stochastic=True), FP8(twoway=False))
    ]
    assert [np.size(residual) for residual in kept] == [50, 50, 0, 0]
