"""PowerSGD: exact on low-rank sums, and as good as the best approximation once its start is warm."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import FRAMEWORKS, Arr, bucket_of, normal, ops_of

from hvd_compress.core.collectives import World
from hvd_compress.methods.powersgd import PowerSGD
from hvd_compress.transport.lockstep import lockstep


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_exact_on_a_sum_of_low_rank(framework: str, ranks: int) -> None:
    """Ranks of 1 each sum to a matrix of rank 3 at most, which rank 3 sends without loss; a convolution too."""
    ops, bucket, method = ops_of(framework), bucket_of((40, 30), (8, 3, 3, 2)), PowerSGD(rank=3)
    rng = np.random.default_rng(0)

    def outer(rows: int, columns: int) -> Arr:
        return np.outer(rng.standard_normal(rows), rng.standard_normal(columns)).ravel()

    xs = [np.concatenate([outer(40, 30), outer(8, 18)]).astype(np.float32) for _ in range(ranks)]
    results = lockstep(ops, method, bucket, xs, [method.init(ops, bucket, World(0, len(xs))) for _ in xs])
    np.testing.assert_allclose(np.asarray(results[0].total), sum(xs), atol=1e-4)


def test_warm_start_converges_to_the_best_approximation() -> None:
    """On a fixed matrix, power iteration comes to the truncated singular value decomposition (Eckart-Young)."""
    bucket, method, ops = bucket_of((64, 48), dtype="float64"), PowerSGD(rank=4), ops_of("numpy")
    u, _, vt = np.linalg.svd(np.random.default_rng(0).standard_normal((64, 48)))
    spectrum = 0.7 ** np.arange(48)
    matrix = (u[:, :48] * spectrum) @ vt
    state, errors = method.init(ops, bucket, World(0, 1)), []
    for _ in range(60):
        (result,) = lockstep(ops, method, bucket, [matrix.ravel()], [state])
        state = result.state
        errors.append(np.linalg.norm(result.total.reshape(64, 48) - matrix))
    best = np.linalg.norm(spectrum[4:])
    assert errors[0] > 1.02 * best
    np.testing.assert_allclose(errors[-1], best, rtol=1e-6)


def test_literal_algorithm() -> None:
    """Two steps of Algorithm 1, written out with numpy alone."""
    bucket, method, ops = bucket_of((10, 6), dtype="float64"), PowerSGD(rank=2), ops_of("numpy")
    states = [method.init(ops, bucket, World(0, 2))] * 2
    q = states[0].q.reshape(6, 2)
    for step in range(2):
        xs = normal(bucket, 2, seed=step)
        results = lockstep(ops, method, bucket, [x.copy() for x in xs], states)
        states = [result.state for result in results]
        ms = [x.reshape(10, 6) for x in xs]
        m = ms[0] + ms[1]
        p, _ = np.linalg.qr(m @ q / 2)
        q = m.T @ p / 2
        np.testing.assert_allclose(results[0].total.reshape(10, 6), 2 * p @ q.T, atol=1e-12)


def test_which_shapes_it_compresses() -> None:
    method = PowerSGD(rank=4)
    assert method.compresses((128, 64)) and method.compresses((32, 16, 3, 3))
    assert not method.compresses((1000,))
    assert not method.compresses((10, 10))  # 100 coordinates, factors of 4 * 20
    assert PowerSGD(rank=4, min_gain=0).compresses((10, 10))


@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [
        ((64, 32, 3, 3), 64, 288),  # PyTorch: output channels first
        ((3, 3, 32, 64), 288, 64),  # TensorFlow: output channels last
        ((128, 10), 128, 10),
        ((7,), 1, 7),
        ((), 1, 1),
    ],
)
def test_how_shapes_are_read_as_matrices(shape: tuple[int, ...], rows: int, columns: int) -> None:
    assert PowerSGD(rank=4).factor(shape) == (rows, columns, min(4, rows, columns))


def test_all_matrices_share_two_rounds() -> None:
    from hvd_compress import LocalWorld

    world = LocalWorld("powersgd:rank=2,min_size=0", size=2, merge=1)
    rng = np.random.default_rng(0)
    world.step({f"w{i}": [rng.standard_normal((30, 20)) for _ in range(2)] for i in range(5)})
    assert world.rounds == 2
    assert world.bytes_sent == 5 * 2 * (30 + 20) * 8
