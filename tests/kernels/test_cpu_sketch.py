"""The kernels of sketches give what the plain version in `hvd_compress.methods.homomorphic` gives."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress.kernels.cpu import sketch
from hvd_compress.ops import mix_seed
from hvd_compress.ops.numpy import hash_indices


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
    plain = np.zeros(3 * table, np.int64)
    np.add.at(plain, cells.ravel(), np.tile(values, 3))
    np.testing.assert_array_equal(sums, plain)

    order, where = sketch.peel(cells, 3 * table)
    assert len(set(order.tolist())) == order.size == where.size
    assert (cells[:, order] == where).any(axis=0).all()
    assert (order.size == keys) is (keys <= 0.8 * 3 * table)
    found = sketch.read(cells, order, where, sums)
    if order.size == keys:
        np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(sums, plain)  # they are only read


def test_keys_in_the_same_cells_are_left_out() -> None:
    cells = np.array([[0, 0, 1], [2, 2, 3], [4, 4, 5]])
    order, where = sketch.peel(cells, 6)
    assert order.tolist() == [2]
    assert where[0] in (1, 3, 5)
    assert sketch.crowd(cells, 6) == 2
