"""Every primitive of PyTorch, and of numpy with CPU kernels, gives what the numpy oracle gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import COMPILED, FRAMEWORKS, ops_of

from hvd_compress.errors import ExchangeError
from hvd_compress.ops import Ops, mix32
from hvd_compress.ops.code import Code
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.ops.packing import packed_size
from hvd_compress.ops.sketch import Sketch

ORACLE = NumpyOps()
SOME_CODES = [Code("max", 4, 16), Code("one", 1), Code("powers", 8)]
RNG = np.random.default_rng(7)
FLOATS = RNG.standard_normal(60).astype(np.float32)
SOME = np.array([3, 9, 20])
EXTREME = np.array([-3e38, 0, 3e38], np.float32)


@pytest.fixture(params=COMPILED, scope="module")
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_of(request.param)


def same(ops: Ops, name: str, *args: Any, atol: float = 0) -> None:
    """Assert that a primitive gives equal bits, shape and dtype, given arrays made by ``ops.constant``.

    With ``atol``, numbers may differ by that much.
    """

    def call(o: Ops) -> list[Any]:
        found = getattr(o, name)(*(o.constant(arg) if isinstance(arg, np.ndarray) else arg for arg in args))
        return [part for part in found if part is not None] if isinstance(found, list | tuple) else [found]

    mine, theirs = call(ORACLE), call(ops)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        b = np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if atol:
            np.testing.assert_allclose(a, b, rtol=0, atol=atol)
        else:
            np.testing.assert_array_equal(a, b)  # a tolerance of 0 would compare integers as float64


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("cast", (FLOATS * 1e3, "float16")),
        ("cast", (FLOATS * 1e6, "float16")),
        ("cast", (FLOATS * 9, "int32")),
        ("cast", (FLOATS, "float64")),
        ("cast", (np.arange(9), "uint16")),
        ("zeros", ((3, 4), "float64")),
        ("arange", (5,)),
        ("reshape", (FLOATS, (6, -1))),
        ("split", (FLOATS, [10, 0, 50])),
        ("pad", (FLOATS, 64)),
        ("pad", (FLOATS, 60)),
        ("floor", (FLOATS * 9,)),
        ("clip", (FLOATS, -0.5, 0.25)),
        ("where", (FLOATS > 0, FLOATS, FLOATS * 2)),
        ("absmax", (FLOATS.reshape(4, 15),)),
        ("extremes", (FLOATS,)),
        *(("to_steps", (FLOATS, np.array([FLOATS.min(), FLOATS.max()]), 2**bits - 1)) for bits in range(2, 9)),
        ("to_steps", (np.full(3, 3, np.float32), np.full(2, 3, np.float32), 15)),
        ("to_steps", (EXTREME, EXTREME[[0, 2]], 255)),
        ("from_steps", (np.arange(256, dtype=np.uint8), EXTREME[[0, 2]], 255)),
        ("from_steps", (np.arange(8, dtype=np.uint8), FLOATS[:2], 7)),
        ("is_finite", (np.array([1.0, np.inf, -np.inf, np.nan]),)),
        ("transpose", (FLOATS.reshape(4, 15),)),
        ("take", (FLOATS, SOME)),
        ("put", (FLOATS, SOME, FLOATS[:3])),
        ("add_at", (FLOATS, SOME, FLOATS[:3])),
        ("to_bytes", (FLOATS, SOME, FLOATS.astype(np.float16), np.arange(3, dtype=np.uint16))),
        ("uniform", (mix32(1), 1000)),
        ("below", (mix32(2), RNG.integers(1, 2**31 - 1, 1000))),
        ("below", (mix32(3), np.ones(9, np.int64))),
        *(
            ("quantise", (FLOATS, code, mix32(4), return_error))
            for code in SOME_CODES
            for return_error in (False, True)
        ),
        *(("quantise", (np.zeros(9, np.float32), Code("one", 1), mix32(seed))) for seed in range(8)),
        *(("dequantise", (ORACLE.quantise(FLOATS, code)[0][None], code, 60, "float32")) for code in SOME_CODES),
        *(
            ("to_lanes", (FLOATS.reshape(3, 20), np.array([1, 2, 3], np.float32), 15, width, mix32(5)))
            for width in (5, 8)
        ),
        ("from_lanes", (np.arange(10, dtype=np.int32), np.ones(3, np.float32), 15, 5, 3, 20)),
        ("kth_magnitude", (FLOATS, 7)),
        ("above", (FLOATS, 0.5)),
        ("blend", (FLOATS, FLOATS[::-1].copy(), 0.25)),
        ("majority", (np.arange(60, dtype=np.float32) - 30, mix32(7), 3.0)),
    ],
)
def test_equal_bits(ops: Ops, name: str, args: tuple[Any, ...]) -> None:
    same(ops, name, *args)


def test_rotations(ops: Ops) -> None:
    """Frameworks add in another order."""
    same(ops, "rotate", FLOATS, mix32(6), 16, atol=1e-6)
    same(ops, "unrotate", FLOATS[:32].reshape(2, 16), mix32(6), atol=1e-6)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("n", [1, 511, 512, 1300])
def test_packed_codes(ops: Ops, n: int, bits: int) -> None:
    same(ops, "pack", RNG.integers(0, 2**bits, n).astype(np.uint8), bits)
    same(ops, "unpack", RNG.integers(0, 256, packed_size(n, bits)).astype(np.uint8), bits, n)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_saturating_sums(ops: Ops, bits: int) -> None:
    rows = RNG.integers(0, 256, (3, 700)).astype(np.uint8)
    for zero in sorted({0, 2 ** (bits - 1), 2**bits - 1}):
        same(ops, "saturating_sum", rows, bits, zero, 700)


def test_what_is_not_as_long_as_it_should_be(ops: Ops) -> None:
    data = ops.zeros((9,), "uint8")
    with pytest.raises(ExchangeError, match=r"a payload has the wrong length \(9 bytes, not 8\)"):
        ops.unpack(data, 1, 64)
    with pytest.raises(ExchangeError, match=r"a payload has the wrong length \(9 bytes, not 8\)"):
        ops.saturating_sum(ops.reshape(data, (1, 9)), 1, 0, 8)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("keys", [0, 1, 50, 51])
def test_sketches(ops: Ops, keys: int, dtype: str) -> None:
    sketch, union, hashes = Sketch(50, 31, 57, dtype), np.zeros(1000, np.uint8), np.arange(8)
    union[RNG.permutation(1000)[:keys]] = 1
    same(ops, "rehearse_sketch", sketch, union, hashes)
    key = ORACLE.rehearse_sketch(sketch, union, hashes)
    assert bool(key[0] < 0) is (keys > 50)
    if keys <= 50:
        x = np.where(union, RNG.standard_normal(1000), 0).astype(dtype)
        peak = np.abs(x).max()[None]
        same(ops, "write_sketch", sketch, union, key, peak, x)
        same(ops, "read_sketch", sketch, union, key, peak, 3 * ORACLE.write_sketch(sketch, union, key, peak, x))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sum_squares(ops: Ops, dtype: str) -> None:
    x = (FLOATS * 1e20).astype(dtype)  # the squares of these leave the range of float32
    total = np.asarray(ops.sum_squares(ops.constant(x)))
    assert total.shape == () and total.dtype == np.float64
    np.testing.assert_allclose(total, sum(float(value) ** 2 for value in x), rtol=1e-12)


def test_concat(ops: Ops) -> None:
    joined = ops.concat([ops.constant(FLOATS), ops.constant(FLOATS[:5])])
    np.testing.assert_array_equal(np.asarray(joined), np.concatenate([FLOATS, FLOATS[:5]]))


def test_bytes_come_back(ops: Ops) -> None:
    parts: list[Any] = [
        FLOATS[:5],
        np.arange(3, dtype=np.uint16),
        FLOATS.astype(np.float64),
        np.arange(7, dtype=np.uint8),
    ]
    data = ops.to_bytes(*(ops.constant(part) for part in parts))
    back = ops.from_bytes(data, *((part.dtype.name, part.size) for part in parts))
    for part, other in zip(parts, back, strict=True):
        np.testing.assert_array_equal(part, np.asarray(other))
        assert part.dtype == np.asarray(other).dtype


def test_put_takes_a_number(ops: Ops) -> None:
    expected = FLOATS.copy()
    expected[SOME] = 0
    np.testing.assert_array_equal(np.asarray(ops.put(ops.constant(FLOATS), ops.constant(SOME), 0.0)), expected)


@pytest.mark.parametrize("k", [1, 2, 7, 59, 60])
@pytest.mark.parametrize("kind", ["distinct", "ties", "zeros", "signs"])
def test_top_indices(ops: Ops, kind: str, k: int) -> None:
    x = {"distinct": FLOATS, "ties": np.round(FLOATS), "zeros": np.zeros(60, np.float32), "signs": np.sign(FLOATS)}
    same(ops, "top_indices", x[kind], k)


@settings(max_examples=25)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50), st.data())
def test_top_indices_of_anything_finite_or_not(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    x = np.array(values, np.float32)
    expected = sorted(sorted(range(len(values)), key=lambda i: (-abs(x[i]), i))[:k])
    assert ORACLE.top_indices(x, k).tolist() == expected
    same(ops_of("torch"), "top_indices", x, k)


@pytest.mark.parametrize("shape", [(9, 4), (4, 4), (50, 1)])
@pytest.mark.parametrize("kind", ["full", "deficient", "zero"])
@pytest.mark.parametrize(("dtype", "atol"), [("float64", 1e-12), ("float32", 1e-5)])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_orthogonalise(framework: str, shape: tuple[int, int], kind: str, dtype: str, atol: float) -> None:
    """Q has orthonormal columns, and Q Q^T x = x: its columns span those of x."""
    ops = ops_of(framework)
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    if kind != "full":
        x[:, -1] = x[:, 0] if kind == "deficient" else 0
    if kind == "zero":
        x[:] = 0
    q = np.asarray(ops.orthogonalise(ops.constant(x)))
    np.testing.assert_allclose(q.T @ q, np.eye(shape[1]), atol=atol)
    np.testing.assert_allclose(q @ (q.T @ x), x, atol=atol)


def test_the_number_of_threads_does_not_change_low_rank_exchanges() -> None:
    """Each rank orthogonalises for itself, and forms the product of the factors."""
    ops, x = ops_of("torch"), torch.randn(4096, 512, generator=torch.Generator().manual_seed(0))
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        p, q = ops.orthogonalise(x[:, :32].clone()), ops.orthogonalise(x[:1024, 32:64].clone())
        found.append((p, ops.products([p], [q])))
    torch.set_num_threads(before)
    assert all(torch.equal(*pair) for one in found[1:] for pair in zip(one, found[0], strict=True))


def test_seeds_agree_and_differ(ops: Ops) -> None:
    parts = [(0,), (1,), (0, 0), (0, 1), (1, 0), (2**32 - 1, 5)]
    seeds = [ORACLE.seed(*p) for p in parts]
    assert [int(ops.seed(*p)) for p in parts] == seeds
    assert len(set(seeds)) == len(seeds)


def test_uniform_is_uniform_and_uncorrelated() -> None:
    """Mean, variance, no correlation with the next element, the next seed or a shifted copy: within 5 sigma."""
    n = 1 << 18
    u, v = (ORACLE.uniform(ORACLE.seed(0, step), n).astype(np.float64) for step in (0, 1))
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * (1 / 12 / n) ** 0.5
    assert abs(u.var() - 1 / 12) < 5 * (1 / 180 / n) ** 0.5
    for a, b in [(u[1:], u[:-1]), (u, v), (u[1:], v[:-1])]:
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / n**0.5
