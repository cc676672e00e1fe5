"""The kernels for codes of a few bits give what the plain version gives."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from catalogue import one_in
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress.errors import ExchangeError
from hvd_compress.ops.code import Code
from hvd_compress.ops.kernels import cpu
from hvd_compress.ops.numpy import NumpyOps

ORACLE: Any = NumpyOps()
SIZES = (0, 1, 7, 511, 512, 513, 1000, 8193, 100_003)
EXACT = [
    *(Code("max", bits, block, dither=bits != 6) for bits in range(2, 9) for block in (512, 100_000)),
    Code("max", 4, 100),
    Code("max", 3, 1),
    Code("max", 4, 1000, dither=False),
    Code("one", 1),
    Code("powers", 8),
    Code("bfloat16", 16),
    *(Code("e4m3", 8, block, dither=block != 512) for block in (1, 77, 512, 100_000)),
    *(Code("e5m2", 8, block, dither=block == 512) for block in (1, 77, 512, 100_000)),
    *(Code("top", 2, size, ratio=share) for size, share in [(1, 1), (77, 0.3), (512, 1), (1024, 0.03), (10**5, 1e-4)]),
]
"""Codes whose scales are no sums, or rounded ones, so that all bits agree."""
SUMMED = [
    Code("l2", 4, 512),
    Code("l2", 2, 5000),
    Code("clipped", 4, 512, clip=2.5),
    Code("clipped", 3, 300, clip=0.5),
    Code("clipped", 2, 1024, clip=0.0, dither=False),
    Code("mean", 1, 8192),
    Code("mean", 1, 77),
    Code("means", 1, 8192),
    Code("means", 1, 1),
]

Floats = npt.NDArray[np.float32]


def numbers(n: int, seed: int) -> Floats:
    """Numbers with ties, zeros of both signs, and some that are very small and very large."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n).astype(np.float32)
    x[rng.random(n) < 0.1] = 0.0
    x[rng.random(n) < 0.1] = -0.0
    x[rng.random(n) < 0.1] = 0.25
    x[n // 2 : n // 2 + 600] *= np.float32(1e-41)
    x[n // 3 : n // 3 + 5] *= np.float32(1e30)
    return x


def frozen(x: Any) -> Any:
    """The array, which may not be written any more."""
    x.flags.writeable = False
    return x


def compress(x: Any, code: Code, seed: int) -> tuple[Any, Any]:
    """The kernel: bytes, and what is left."""
    error = np.empty_like(x)
    return cpu.quantise(x, code, seed, error), error


@pytest.mark.parametrize(("code", "n"), one_in(4, itertools.product(EXACT, SIZES)), ids=str)
def test_the_bytes_and_what_is_left_are_the_oracles(n: int, code: Code) -> None:
    if code.kind == "powers" and not n:
        return  # the plain version has no largest of nothing
    x = frozen(numbers(n, 1))
    data, error = ORACLE.quantise(x, code, 9, True)
    mine, out = compress(x, code, 9)
    np.testing.assert_array_equal(mine, data)
    np.testing.assert_array_equal(out, error)
    np.testing.assert_array_equal(cpu.quantise(x, code, 9), data)
    place = x.copy()
    np.testing.assert_array_equal(cpu.quantise(place, code, 9, place), data)
    np.testing.assert_array_equal(place, error)


@pytest.mark.parametrize(("code", "n"), one_in(4, itertools.product(SUMMED, SIZES)), ids=str)
def test_scales_that_are_sums_agree_up_to_rounding_and_codes_fit_them(n: int, code: Code) -> None:
    x = frozen(numbers(n, 3))
    data, _ = ORACLE.quantise(x, code, 9)
    mine, error = compress(x, code, 9)
    skip = 4 * code.scales * -(-n // max(1, min(n, code.block)))
    scales = mine[:skip].view(np.float32)
    np.testing.assert_allclose(scales, data[:skip].view(np.float32), rtol=3e-6, atol=1e-44)
    decoded = cpu.dequantise(frozen(mine[None]), code, n)
    np.testing.assert_array_equal(decoded, ORACLE.dequantise(mine[None], code, n, "float32"))
    np.testing.assert_array_equal(error, x - decoded)
    # A code differs only where a scale that is off by a rounding error moves a number over the edge between two codes.
    assert (mine[skip:] != data[skip:]).sum() <= 1 + n // 1000


@pytest.mark.parametrize(("code", "n"), one_in(4, itertools.product(EXACT + SUMMED, SIZES)), ids=str)
def test_sums_are_those_of_the_oracle_in_its_order(n: int, code: Code) -> None:
    if code.kind == "powers" and not n:
        return
    rows = np.stack([ORACLE.quantise(numbers(n, seed), code, seed)[0] for seed in range(3)])
    want = ORACLE.dequantise(rows, code, n, "float32")
    joined = ORACLE.dequantise(rows, code, n, "float32", True)
    frozen(rows)
    np.testing.assert_array_equal(cpu.dequantise(rows, code, n), want)
    np.testing.assert_array_equal(cpu.dequantise(rows[:1], code, n, out=np.empty(n, np.float32)), joined[:n])
    np.testing.assert_array_equal(cpu.dequantise(rows, code, n, True), joined)
    for first, last in [(0, n // 2), (n // 2, n), (n // 3, n // 3 + min(n - n // 3, 7)), (n, n)]:
        np.testing.assert_array_equal(cpu.dequantise(rows, code, n, span=(first, last)), want[first:last])
        part = (first + n // 2, last + n // 2 + n)  # ends in another row
        np.testing.assert_array_equal(cpu.dequantise(rows, code, n, True, span=part), joined[part[0] : part[1]])
    wide = np.zeros((3, rows.shape[1] + 1), np.uint8)  # rows that do not lie one after another
    wide[:, 1:] = rows
    np.testing.assert_array_equal(cpu.dequantise(wide[:, 1:], code, n), want)


def test_payloads_of_a_wrong_length_are_refused() -> None:
    with pytest.raises(ExchangeError, match=r"has the wrong length \(9 bytes, not 8\)"):
        cpu.dequantise(np.zeros((2, 9), np.uint8), Code("max", 4, 512), 8)


def test_bytes_that_do_not_begin_at_a_whole_number_can_be_read() -> None:
    code, buffer = Code("bfloat16", 16), np.zeros(21, np.uint8)
    data, _ = compress(numbers(10, 1), code, 0)
    buffer[1:] = data
    np.testing.assert_array_equal(
        cpu.dequantise(buffer[1:].reshape(1, 20), code, 10), cpu.dequantise(data[None], code, 10)
    )


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3e-45, 1e30, 3.4e38, 1e-37, 4e-37])
def test_constants(value: float) -> None:
    x = np.full(600, value, np.float32)
    for code in EXACT:
        data, error = ORACLE.quantise(x, code, 1, True)
        mine, out = compress(x, code, 1)
        np.testing.assert_array_equal(mine, data)
        np.testing.assert_array_equal(out, error)


@settings(max_examples=60)
@given(
    st.integers(1, 2000),
    st.integers(1, 2000),
    st.integers(2, 8),
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1e-44, 1e-36, 1.0, 1e38]),
)
def test_any_length_block_width_and_seed(n: int, block: int, bits: int, dither: bool, seed: int, scale: float) -> None:
    x = (np.random.default_rng(seed).uniform(-1, 1, n) * scale).astype(np.float32)
    code = Code("max", bits, block, dither=dither)
    data, error = ORACLE.quantise(x, code, seed, True)
    mine, out = compress(x, code, seed)
    np.testing.assert_array_equal(mine, data)
    np.testing.assert_array_equal(out, error)
    want = ORACLE.dequantise(data[None], code, n, "float32")
    np.testing.assert_array_equal(cpu.dequantise(mine[None], code, n), want)
