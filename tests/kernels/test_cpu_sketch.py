"""The kernels of sketches give what the plain version in `hvd_compress.ops.sketch` gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hvd_compress.ops import mix_seed
from hvd_compress.ops import sketch as plain
from hvd_compress.ops.hashing import hash_indices
from hvd_compress.ops.kernels import cpu
from hvd_compress.ops.kernels.cpu import sketch, sketching
from hvd_compress.ops.sketch import Sketch

Arr = npt.NDArray[Any]


@pytest.mark.parametrize(("keys", "table"), [(0, 8), (1, 8), (10, 12), (1000, 450), (1000, 350), (20_000, 8900)])
def test_what_is_written_is_read_back_unless_keys_are_in_each_others_way(keys: int, table: int) -> None:
    rng = np.random.default_rng(keys)
    indices = np.sort(rng.choice(10**6, keys, replace=False))
    values = rng.integers(-(2**56), 2**56, keys)
    seeds = [mix_seed(7, number) for number in range(3)]
    indices.flags.writeable = values.flags.writeable = False

    cells = sketch.places(indices, seeds, table)
    hashes = [hash_indices(seed, indices).astype(np.int64) * table >> 32 for seed in seeds]
    np.testing.assert_array_equal(cells, [h + number * table for number, h in enumerate(hashes)])
    assert sketch.crowd(cells, 3 * table) == np.bincount(cells.ravel(), minlength=1).max()

    sums = sketch.write(cells, values, 3 * table)
    added = np.zeros(3 * table, np.int64)
    np.add.at(added, cells.ravel(), np.tile(values, 3))
    np.testing.assert_array_equal(sums, added)

    order, where = sketch.peel(cells, 3 * table)
    assert len(set(order.tolist())) == order.size == where.size
    assert (cells[:, order] == where).any(axis=0).all()
    assert (order.size == keys) is (keys <= 0.8 * 3 * table)
    found = sketch.read(cells, order, where, sums)
    if order.size == keys:
        np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(sums, added)  # they are only read


def test_keys_in_the_same_cells_are_left_out() -> None:
    cells = np.array([[0, 0, 1], [2, 2, 3], [4, 4, 5]])
    order, where = sketch.peel(cells, 6)
    assert order.tolist() == [2]
    assert where[0] in (1, 3, 5)
    assert sketch.crowd(cells, 6) == 2


def bitmap(n: int, keys: int, seed: int = 0) -> Arr:
    """So many coordinates of ``n``, by bytes that are not zero; it may not be written."""
    rng = np.random.default_rng(seed)
    union = np.zeros(n, np.uint8)
    union[rng.permutation(n)[:keys]] = rng.integers(1, 256, keys)
    union.flags.writeable = False
    return union


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 33, 1000, 100_003])
def test_coordinates_are_found(n: int) -> None:
    for keys in sorted({0, 1, n // 100, n // 2, n}):
        for union in (bitmap(n, min(keys, n)), bitmap(n + 1, min(keys, n))[1:]):
            there = np.flatnonzero(union)
            for most in (there.size, there.size + 1, n, 10**9):
                np.testing.assert_array_equal(sketch.found(union, most), there)
            for most in {0, there.size // 2, max(there.size - 1, 0)} - {there.size}:
                some = sketch.found(union, most)
                assert most < some.size <= most + 16
                np.testing.assert_array_equal(some, there[: some.size])


@pytest.mark.parametrize(
    ("keys", "capacity", "table"), [(0, 5, 8), (1, 5, 8), (50, 50, 24), (51, 50, 24), (999, 999, 408)]
)
def test_hashes_are_chosen_as_the_plain_version_does(keys: int, capacity: int, table: int) -> None:
    """With tables so small that some hashes fail."""
    measures, chosen = Sketch(capacity, table, 57, "float32"), set()
    for seed in range(20):
        union = bitmap(5000, keys, seed)
        key = cpu.rehearse_sketch(measures, union, np.arange(4))
        assert key == measures.rehearse(union, np.arange(4))
        chosen.add(key)
    if keys > capacity:
        assert chosen == {-1}
    else:
        assert 0 in chosen and (len(chosen) > 1) is (keys >= 50)


def test_crowded_cells_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    measures, chosen = Sketch(50, 31, 57, "float32"), set()
    for module in (sketching, plain):
        monkeypatch.setattr(module, "CROWD", 2)
    for seed in range(20):
        union = bitmap(5000, 50, seed)
        key = cpu.rehearse_sketch(measures, union, np.arange(1))
        assert key == measures.rehearse(union, np.arange(1))
        chosen.add(key)
    assert chosen == {0, -1}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("n", "keys"), [(16, 0), (17, 1), (5000, 100), (100_003, 5000)])
def test_sketches_have_the_bits_of_the_plain_version(n: int, keys: int, dtype: str) -> None:
    rng = np.random.default_rng(keys)
    union, measures = bitmap(n, keys), Sketch(max(keys, 1), keys // 2 + 8, 56, dtype)
    x, y = (np.where(union, rng.standard_normal(n) * np.exp(9 * rng.standard_normal(n)), 0).astype(dtype) for _ in "xy")
    peak = np.maximum(np.abs(x).max(), np.abs(y).max())[None]
    key = np.array([cpu.rehearse_sketch(measures, union, np.arange(8))])
    assert key[0] >= 0
    sums = cpu.write_sketch(measures, union, key, peak, x)
    np.testing.assert_array_equal(sums, measures.write(union, key, peak, x))
    sums = sums + cpu.write_sketch(measures, union, key, peak, y)
    before = sums.copy()
    read = cpu.read_sketch(measures, union, key, peak, sums)
    assert read.dtype == dtype and read.tobytes() == measures.read(union, key, peak, sums).tobytes()
    np.testing.assert_array_equal(sums, before)
