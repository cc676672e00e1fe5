"""Codes of a few bits, and lanes: the kernels give what the oracle gives. See test_cuda.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from kernels.cuda.device import get, put

from hvd_compress.errors import ExchangeError
from hvd_compress.ops import mix32
from hvd_compress.ops.blocks import Blocks
from hvd_compress.ops.code import Code
from hvd_compress.ops.kernels.cuda import dequantise, from_lanes, norms, quantise, to_lanes
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.ops.packing import unpack

Arr = npt.NDArray[Any]

ORACLE = NumpyOps()
SIZES = (0, 1, 7, 513, 1500, 5000)
CODES = (
    *(Code("max", bits, 512) for bits in (2, 3, 4, 7, 8)),
    Code("max", 4, 1536),
    Code("max", 4, 512, dither=False),
    Code("max", 3, 100),
    Code("max", 5, 10**6),
    Code("max", 2, 1),
    Code("l2", 4, 1024),
    Code("l2", 6, 700),
    Code("clipped", 2, 512, 2.5),
    Code("clipped", 2, 700, 2.5),
    Code("clipped", 4, 512),
    Code("mean", 1, 1024),
    Code("mean", 1, 8704),
    Code("mean", 1, 100),
    Code("means", 1, 512),
    Code("means", 1, 100),
    Code("one", 1),
    Code("powers", 8),
    Code("bfloat16", 16),
    Code("e4m3", 8, 512, dither=False),
    Code("e4m3", 8, 100),
    Code("e5m2", 8, 512),
    Code("e5m2", 8, 10**6, dither=False),
    Code("top", 2, 512, ratio=0.03),
    Code("top", 2, 300, ratio=0.3),
    Code("top", 2, 1500, ratio=0.01),
    Code("top", 2, 1024, ratio=1),
)
SOME = [code for code in CODES if code.block in (1, 100, 512) and code.bits not in (3, 5, 7)]


def values(n: int, seed: int) -> Arr:
    """Numbers of all sizes, some of them zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n) * 2.0 ** rng.integers(-8, 8, n) * rng.choice([1, 1, 1, 0], n)
    return np.asarray(x, np.float32)


def special() -> Arr:
    """Blocks of zeros of both signs, and of equal, denormal, tiny, large and all kinds of numbers."""
    n = 512
    parts = [
        np.zeros(n),
        np.where(np.arange(n) % 3 > 0, 0.0, -0.0),
        np.full(n, -2.5),
        values(n, 3) * 1e-42,
        values(n, 4) * 1e-37,
        np.clip(values(n, 5), -1, 1) * 1e30,
        values(n, 6) * np.exp(np.linspace(-40, 40, n)),
        np.full(90, -1e-40),
    ]
    return np.asarray(np.concatenate(parts), np.float32)


def check(x: Arr, code: Code, seed: int) -> None:
    """Compare all that a code does to an array."""
    n = x.size
    expected, _ = ORACLE.quantise(x, code, seed)
    data, nothing = quantise(put(x), code, seed)
    assert nothing is None and data.dtype == torch.uint8 and data.shape == expected.shape
    head = 4 * code.scales * Blocks.of(n, code.block).number
    mine = get(data)
    if code.kind in ("max", "one", "powers", "bfloat16", "e4m3", "e5m2", "top"):
        np.testing.assert_array_equal(mine, expected)
    else:  # sums in another order
        scales, theirs = (part[:head].view(np.float32) for part in (mine, expected))
        np.testing.assert_allclose(scales, theirs, rtol=1e-6, atol=1e-42)
        codes, others = (unpack(ORACLE, part[head:], code.bits, n).astype(int) for part in (mine, expected))
        assert abs(codes - others).max(initial=0) <= 1 and (codes != others).sum() <= n / 500

    array = put(x)
    again, error = quantise(array, code, seed, return_error=True, out=array)
    assert error is array and torch.equal(again, data)
    np.testing.assert_array_equal(get(array), x - ORACLE.dequantise(mine[None], code, n, "float32"))

    rows = np.stack([mine, ORACLE.quantise(x[::-1].copy(), code, seed)[0], mine])
    for join in (False, True):
        total = dequantise(put(rows), code, n, join)
        np.testing.assert_array_equal(get(total), ORACLE.dequantise(rows, code, n, "float32", join))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("code", CODES, ids=lambda code: "-".join(map(str, code)))
def test_codes(code: Code, n: int) -> None:
    if (n or code.kind != "powers") and (n < 5000 or code.bits in (1, 4, 16)):  # nothing has no largest exponent
        check(values(n, 1), code, 12345 + n)


@pytest.mark.parametrize("code", SOME, ids=lambda code: "-".join(map(str, code)))
def test_special_values(code: Code) -> None:
    with np.errstate(over="ignore"):
        check(special(), code, 7)


def test_zeros_have_the_sign_that_the_seed_draws() -> None:
    for seed in range(8):
        check(special(), Code("one", 1), mix32(seed))


def test_powers_where_all_is_denormal() -> None:
    check(np.linspace(-1.1e-38, 1.1e-38, 100, dtype=np.float32), Code("powers", 8), 7)


def test_a_row_may_begin_anywhere() -> None:
    code, x = Code("max", 3, 512), values(1500, 1)
    data = quantise(put(x), code, 3)[0]
    shifted = torch.cat([data[:1], data])[1:].reshape(1, -1)
    np.testing.assert_array_equal(
        get(dequantise(shifted, code, 1500)), ORACLE.dequantise(get(data)[None], code, 1500, "float32")
    )


def test_a_row_of_another_length() -> None:
    with pytest.raises(ExchangeError, match=r"\(7 bytes, not 10\)"):
        dequantise(put(np.zeros((2, 7), np.uint8)), Code("max", 4, 512), 12)


@pytest.mark.parametrize("shape", [(0, 5), (1, 7), (3, 171), (5, 300), (50, 100)])
@pytest.mark.parametrize(("width", "top"), [(5, 15), (8, 30), (20, 5000)])
def test_lanes(shape: tuple[int, int], width: int, top: int) -> None:
    rows = values(shape[0] * shape[1], 1).reshape(shape)
    own = np.abs(rows).max(axis=1, initial=0).astype(np.float32) * np.float32(0.9)
    for limits in (own, np.array([1.5], np.float32)) if shape[0] else (np.array([1.5], np.float32),):
        packed = ORACLE.to_lanes(rows, limits, top, width, 99)
        mine = to_lanes(put(rows), put(limits), top, width, 99)
        np.testing.assert_array_equal(get(mine), packed)
        back = get(from_lanes(put(packed), put(limits), top, width, *shape))
        np.testing.assert_array_equal(back, ORACLE.from_lanes(packed, limits, top, width, *shape))
        assert back.dtype == np.float32 and mine.dtype == torch.int32


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (1, 1), (1, 7), (171, 3), (1, 5000), (3, 500)])
def test_norms(shape: tuple[int, int]) -> None:
    rows = values(shape[0] * shape[1], 1).reshape(shape)
    for scale in (1, 1e-30, 1e30):
        scaled = rows * np.float32(scale)
        expected = np.sqrt((scaled.astype(np.float64) ** 2).sum(axis=1))
        mine = norms(put(scaled))
        np.testing.assert_allclose(get(mine), expected, rtol=1e-6)
        assert mine.dtype == torch.float32
