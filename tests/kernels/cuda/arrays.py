"""All but codes: the kernels give what the oracle gives. See test_cuda.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from kernels.cuda.device import DEVICE, get, put

from hvd_compress.ops.kernels.cuda import (
    above,
    accelerate,
    add_at,
    kth_magnitude,
    precondition,
    put_finite,
    rotate,
    rotation,
    top_indices,
    unrotate,
)
from hvd_compress.ops.moments import Sides, size_of
from hvd_compress.ops.numpy import NumpyOps

Arr = npt.NDArray[Any]

ORACLE = NumpyOps()
SIZES = (0, 1, 7, 513, 1500, 5000)


def normal(n: int, seed: int = 1) -> Arr:
    """Numbers to work on."""
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def same(mine: torch.Tensor, expected: Arr) -> None:
    """Assert equal bits, shape and dtype."""
    array = get(mine)
    assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(np.frombuffer(array.tobytes(), np.uint8), np.frombuffer(expected.tobytes(), np.uint8))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("block", [1, 2, 64, 1024, 4096, 2**13])
def test_rotation(n: int, block: int) -> None:
    x = normal(n)
    rows = ORACLE.rotate(x.copy(), 2**31 + 5, block)
    mine = rotate(put(x), 2**31 + 5, block)
    np.testing.assert_allclose(get(mine), rows, atol=3e-6)
    assert get(mine).shape == rows.shape and mine.dtype == torch.float32
    np.testing.assert_allclose(get(unrotate(mine, 2**31 + 5)), ORACLE.unrotate(rows.copy(), 2**31 + 5), atol=6e-6)


def test_rotation_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "_TILE", 64)
    monkeypatch.setattr(rotation, "_RADIX", 8)
    x = normal(900)
    for block in (2**7, 2**10):  # 64 * 2 and 64 * 8 * 2
        rows = ORACLE.rotate(x.copy(), 5, block)
        np.testing.assert_allclose(get(rotate(put(x), 5, block)), rows, atol=6e-6)
        np.testing.assert_allclose(get(unrotate(put(rows), 5))[:900], x, atol=6e-6)


def test_rotation_in_place() -> None:
    """Rows are overwritten when they are rotated back, but not what they come from."""
    x = put(normal(4096))
    rows = rotate(x, 5, 1024)
    np.testing.assert_array_equal(get(x), normal(4096))
    assert rows.data_ptr() == unrotate(rows, 5).data_ptr()


@pytest.mark.parametrize("n", SIZES[1:])
@pytest.mark.parametrize("kind", ["distinct", "ties", "zeros", "infinite"])
def test_selection(kind: str, n: int) -> None:
    x = normal(n)
    x = {"distinct": x, "ties": np.round(x), "zeros": np.copysign(0, x), "infinite": x * np.float32(1e-42)}[kind]
    x[n // 2 :: 700] = np.inf if kind == "infinite" else x[n // 2 :: 700]
    array = put(x)
    for k in sorted({1, n // 100 + 1, max(1, n - 1), n}):
        same(top_indices(array, k), ORACLE.top_indices(x, k))
        same(kth_magnitude(array, k), np.asarray(ORACLE.kth_magnitude(x, k)))
    for threshold in (np.float32(0.5), 0.0, -1.0, float(abs(x[0])), np.inf):
        same(above(array, threshold), ORACLE.above(x, np.float32(threshold)))


def test_selection_of_nothing() -> None:
    same(top_indices(put(normal(9)), 0), np.zeros(0, np.int64))
    same(above(put(normal(0)), 0.5), np.zeros(0, np.int64))
    same(above(put(normal(9)), put(np.asarray(0.5))), ORACLE.above(normal(9), np.float32(0.5)))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum(n: int, nesterov: bool) -> None:
    x, velocity, residual = normal(n, 1), normal(n, 2), normal(n, 3)
    expected = ORACLE.accelerate(x.copy(), velocity, residual, 0.9, nesterov)
    tensors = (put(x), put(velocity), put(residual))
    mine = accelerate(*tensors, 0.9, nesterov)
    for a, b in zip(mine, expected, strict=True):
        same(a, b)


MATRICES = ([(3, 2)], [(5, 1), (64, 64), (1, 1), (65, 130)], [(2, 1500), (1030, 3), (2000, 1), (200, 70)])


@pytest.mark.parametrize("shapes", MATRICES)
@pytest.mark.parametrize("size", [1.0, 0.0, 1e-30, 1e20])
def test_preconditioning(shapes: list[tuple[int, int]], size: float) -> None:
    sides = [Sides(*shape) for shape in shapes]
    n, kept = sum(rows * columns for rows, columns in sides), sum(map(size_of, sides))
    expected, second = np.zeros(0), np.zeros(kept, np.float32)
    for step in range(3):  # where moments are zero, where weights are small, and after that
        x = normal(n, step) * np.float32(size)
        x[: n // 3 : 2] = 0
        before = put(second)
        mine = [get(one) for one in precondition(put(x), before, sides, 0.9)]
        np.testing.assert_array_equal(get(before), second)
        expected, second = ORACLE.precondition(x, second, sides, 0.9)
        np.testing.assert_allclose(mine[0], expected, rtol=1e-5)  # as sums of the oracle have 24 bits
        np.testing.assert_allclose(mine[1], second, rtol=1e-5)


@pytest.mark.parametrize("n", SIZES)
def test_scatter_add(n: int) -> None:
    x, values = normal(n, 1), normal(n // 2, 2)
    indices = np.sort(np.random.default_rng(3).permutation(n)[: n // 2])
    mine = add_at(put(x), put(indices), put(values))
    same(mine, ORACLE.add_at(x, indices, values))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_copy_of_what_is_finite(n: int, dtype: torch.dtype) -> None:
    x, residual = put(normal(n, 1)).to(dtype), put(normal(n, 2))
    out = torch.full((n,), 7.0, dtype=torch.float32, device=DEVICE)
    peak = put_finite(out, x)
    assert (peak.shape, peak.dtype, peak.item()) == ((), torch.float32, 0) and torch.equal(out, x.float())
    assert not put_finite(residual, x, residual.clone()) and torch.equal(residual, put(normal(n, 2)) + out)
    for bad in (np.inf, -np.inf, np.nan):
        for place in {0, n // 2, n - 1} if n else ():
            broken = x.clone()
            broken[place] = bad
            assert put_finite(out, broken).isnan() and not out.any()
