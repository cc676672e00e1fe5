"""Random-k: k distinct coordinates, the same on all ranks, others in the next step."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import Arr, bucket_of, normal, ops_of

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import SentIndices, World
from hvd_compress.methods.randomk import RandomK
from hvd_compress.transport.lockstep import lockstep


def draws(method: RandomK, bucket: Bucket, steps: int) -> list[Arr]:
    """Which coordinates each step sends."""
    ops = ops_of("numpy")
    state, sent = method.init(ops, bucket, World(0, 1)), []
    for _ in range(steps):
        (result,) = lockstep(ops, method, bucket, [np.ones(bucket.numel, np.float32)], [state])
        state = result.state
        sent.append(np.flatnonzero(result.total))
    return sent


@pytest.mark.parametrize(("numel", "ratio", "k"), [(1000, 0.1, 100), (1003, 0.1, 100), (7, 0.5, 4), (5, 1.0, 5)])
def test_exactly_k_distinct(numel: int, ratio: float, k: int) -> None:
    for sent in draws(RandomK(ratio=ratio), bucket_of((numel,)), 20):
        assert len(sent) == k


def test_every_coordinate_is_equally_likely() -> None:
    """Chi-squared over 2,000 steps; 99 degrees of freedom, so 99 +- 5 * sqrt(198)."""
    bucket, steps = bucket_of((100,)), 2000
    hits = np.bincount(np.concatenate(draws(RandomK(ratio=0.1), bucket, steps)), minlength=100)
    expected = steps * 0.1
    assert abs(np.sum((hits - expected) ** 2 / (expected * 0.9)) - 99) < 5 * 198**0.5


def test_steps_buckets_and_seeds_differ() -> None:
    bucket = bucket_of((1000,))
    first, second = draws(RandomK(ratio=0.1), bucket, 2)
    (other_bucket,) = draws(RandomK(ratio=0.1), bucket._replace(key="b1"), 1)
    (other_seed,) = draws(RandomK(ratio=0.1, seed=1), bucket, 1)
    for other in (second, other_bucket, other_seed):
        assert len(np.intersect1d(first, other)) < 30  # 10 expected by chance


def test_the_global_generator_is_left_alone() -> None:
    np.random.seed(3)
    before = np.random.get_state()[1].copy()  # type: ignore[index]
    draws(RandomK(), bucket_of((1000,)), 3)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # type: ignore[index]


def test_values_are_summed_where_they_belong() -> None:
    bucket, ops, method = bucket_of((300,)), ops_of("numpy"), RandomK(ratio=0.2)
    xs = normal(bucket, 4)
    results = lockstep(ops, method, bucket, xs, [method.init(ops, bucket, World(0, len(xs))) for _ in xs])
    sent_indices = results[0].sent_indices
    assert isinstance(sent_indices, SentIndices)
    sent = sent_indices.rows
    np.testing.assert_allclose(results[0].total[sent], np.sum(xs, axis=0)[sent], rtol=1e-6)
    assert np.count_nonzero(results[0].total) == len(sent) == 60
