"""The kernels that pack codes, unpack and add them up give what the plain version gives."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from catalogue import one_in
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress.errors import ExchangeError
from hvd_compress.ops.kernels import cpu
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.ops.packing import packed_size

ORACLE = NumpyOps()
SIZES = (0, 1, 7, 8, 9, 63, 64, 65, 511, 512, 513, 1000, 8193, 100_003)

Bytes = npt.NDArray[np.uint8]


def random_bytes(shape: int | tuple[int, int], below: int = 256, seed: int = 0) -> Bytes:
    """Bytes that may not be written."""
    data = np.random.default_rng(seed).integers(0, below, shape).astype(np.uint8)
    data.flags.writeable = False
    return data


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_are_packed_and_come_back(bits: int) -> None:
    for n in SIZES:
        for codes in (random_bytes(n, 2**bits), random_bytes(n + 1, 2**bits)[1:]):
            packed = cpu.pack(codes, bits)
            assert packed.dtype == np.uint8
            np.testing.assert_array_equal(packed, ORACLE.pack(codes, bits))
            np.testing.assert_array_equal(cpu.unpack(packed, bits, n), codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_any_bytes_are_unpacked_alike(bits: int) -> None:
    """Also where bits are set behind the last code, as damage can do."""
    for n in SIZES:
        data = random_bytes(packed_size(n, bits))
        codes = cpu.unpack(data, bits, n)
        assert codes.dtype == np.uint8
        np.testing.assert_array_equal(codes, ORACLE.unpack(data, bits, n))


@pytest.mark.parametrize("wrong", [-1, 1])
@pytest.mark.parametrize("bits", [1, 3, 8])
def test_other_lengths_are_refused(bits: int, wrong: int) -> None:
    size = packed_size(600, bits)
    with pytest.raises(ExchangeError, match=rf"\({size + wrong} bytes, not {size}\)"):
        cpu.unpack(random_bytes(size + wrong), bits, 600)
    with pytest.raises(ExchangeError, match=rf"\({size + wrong} bytes, not {size}\)"):
        cpu.saturating_sum(random_bytes((2, size + wrong)), 1, 0, size)


@pytest.mark.parametrize(("ranks", "bits"), one_in(3, itertools.product([1, 2, 3, 40], [1, 2, 4, 8])))
def test_saturating_sums(ranks: int, bits: int) -> None:
    for size in (0, 1, 255, 511, 512, 513, 10_001):
        rows = random_bytes((ranks, size))
        for zero in sorted({0, 1, 2 ** (bits - 1), 2**bits - 1}):
            total = cpu.saturating_sum(rows, bits, zero, size)
            assert total.dtype == np.uint8
            np.testing.assert_array_equal(total, ORACLE.saturating_sum(rows, bits, zero, size))


@settings(max_examples=30)
@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 6), st.integers(0, 2**32 - 1), st.data())
def test_saturating_sums_of_codes_that_are_mostly_near_zero(
    bits: int, ranks: int, seed: int, data: st.DataObject
) -> None:
    """Sums within the range and on both of its ends."""
    zero = data.draw(st.integers(0, 2**bits - 1))
    rng = np.random.default_rng(seed)
    codes = np.clip(zero + np.rint(rng.standard_normal((ranks, 600)) * 2 ** (bits - 2)), 0, 2**bits - 1)
    rows = np.stack([ORACLE.pack(row.astype(np.uint8), bits) for row in codes])
    total = cpu.saturating_sum(rows, bits, zero, rows.shape[1])
    want = np.clip(np.sum(codes.astype(np.int64) - zero, axis=0), -zero, 2**bits - 1 - zero) + zero
    np.testing.assert_array_equal(ORACLE.unpack(total, bits, 600), want)
