"""Top-k keeps what is largest."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import bucket_of, normal, ops_of

from hvd_compress import LocalWorld
from hvd_compress.core.collectives import AllGather, World
from hvd_compress.methods.topk import TopK
from hvd_compress.methods.wrappers.error_feedback import ErrorFeedback
from hvd_compress.ops.code import count
from hvd_compress.transport.lockstep import lockstep


def test_literal_example() -> None:
    """Rank 0 sends 8, rank 1 sends -4 and each keeps the rest."""
    world = LocalWorld("topk:ratio=0.25", size=2)
    means = world.step([np.array([1.0, 8.0, 3.0, 0.0]), np.array([-4.0, 0.0, 1.0, 2.0])])
    for mean in means:
        np.testing.assert_array_equal(mean, [-2, 4, 0, 0])
    np.testing.assert_array_equal(world.residual(0)[""], [1, 0, 3, 0])
    np.testing.assert_array_equal(world.residual(1)[""], [0, 0, 1, 2])
    # what was kept is sent when it has grown: 1+1, 0, 3+1, 0 and 0, 0, 1+1, 2+1
    np.testing.assert_array_equal(world.step([np.array([1.0, 0, 1, 0]), np.array([0.0, 0, 1, 1])])[0], [0, 0, 2, 1.5])


@pytest.mark.parametrize(
    ("ratio", "numel", "k"), [(0.01, 1000, 10), (0.01, 10, 1), (1.0, 7, 7), (0.5, 3, 2), (1e-9, 5, 1), (0.999, 2, 2)]
)
def test_count(ratio: float, numel: int, k: int) -> None:
    assert count(ratio, numel) == k


@pytest.mark.parametrize(("numel", "page_bytes"), [(2**16, 0), (2**16 + 1, 2 * 4)])
def test_indices_take_16_bits(numel: int, page_bytes: int) -> None:
    bucket, method, ops = bucket_of((numel,)), TopK(ratio=0.001), ops_of("numpy")
    x = np.zeros(numel, np.float32)
    x[-1] = 5.0  # the largest index must survive its encoding
    message = next(method.exchange(ops, bucket, x, (), World(0, 1)))
    assert isinstance(message, AllGather)
    assert message.array.nbytes == page_bytes + count(0.001, numel) * (4 + 2)
    assert lockstep(ops, method, bucket, [x], [()])[0].total[-1] == 5.0


def test_rounding_to_fp16_stays_in_the_residual() -> None:
    bucket, ops = bucket_of((4,)), ops_of("numpy")
    method = ErrorFeedback(TopK(ratio=0.5, values="fp16"))
    x = np.array([1.0 + 2**-12, 1e6, 0.5, 0.25], np.float32)
    (result,) = lockstep(ops, method, bucket, [x], [method.init(ops, bucket, World(0, 1))])
    assert result.total.tolist() == [1.0, 65504.0, 0, 0]
    np.testing.assert_array_equal(result.state.residual, x - result.total)


def test_no_other_k_coordinates_lose_less() -> None:
    bucket, ops = bucket_of((500,)), ops_of("numpy")
    (x,) = normal(bucket, 1)
    (result,) = lockstep(ops, TopK(ratio=0.1), bucket, [x], [()])
    assert np.count_nonzero(result.total) == 50
    np.testing.assert_allclose(np.sum((x - result.total) ** 2), np.sum(np.sort(x**2)[:450]), rtol=1e-6)
