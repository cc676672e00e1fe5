"""ARC-Top-K: its equations, and what its sketch sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from worlds import FRAMEWORKS, Arr, bucket_of, normal, ops_of

from hvd_compress.core.collectives import AllReduce, Collective, World
from hvd_compress.errors import SpecError
from hvd_compress.methods.arctopk import ARCTopK
from hvd_compress.methods.topkc import TopKC
from hvd_compress.methods.wrappers.error_feedback import ErrorFeedback
from hvd_compress.transport.lockstep import lockstep

NUMPY = ops_of("numpy")


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_it_sums_the_rows_with_the_largest_sketch(ranks: int, framework: str) -> None:
    """Against the equations, with the sketch that was sent; the last of 63 rows has 3 coordinates."""
    ops, bucket = ops_of(framework), bucket_of((499,), dtype="float64")
    method = ErrorFeedback(ARCTopK(ratio=0.2, width=8, rank=3))
    states: list[Any] = [method.init(ops, bucket, World(rank, ranks)) for rank in range(ranks)]
    residuals, drawn = [np.zeros(504)] * ranks, []
    for step in range(4):
        xs, messages = normal(bucket, ranks, seed=step), list[Collective]()
        results = lockstep(ops, method, bucket, xs, states, messages.append)
        states = [result.state for result in results]

        ps = [np.pad(x, (0, 5)) + e for x, e in zip(xs, residuals, strict=True)]
        v, *_ = np.linalg.lstsq(ps[0].reshape(63, 8), messages[0].array.reshape(63, 3), rcond=None)
        drawn.append(v)
        sketch = sum(p.reshape(63, 8) @ v for p in ps)
        chosen = np.isin(np.arange(63), np.argsort(-np.sum(sketch**2, axis=1))[:13]).repeat(8)
        np.testing.assert_allclose(np.asarray(results[0].total), (sum(ps) * chosen)[:499], atol=1e-12)
        residuals = [p * ~chosen for p in ps]
        for state, expected in zip(states, residuals, strict=True):
            np.testing.assert_allclose(np.asarray(state.residual), expected[:499], atol=1e-12)
    assert 0.43 < np.std(drawn) < 0.73 and abs(np.mean(drawn)) < 0.2  # N(0, 1/3), of 96 numbers


def test_all_ranks_draw_the_same_matrix_and_another_one_in_each_step() -> None:
    method, bucket = ARCTopK(ratio=0.5, width=4), bucket_of((16,))
    state = method.init(NUMPY, bucket, World(0, 2))

    def sketch(rank: int, step: int, seed: int = 0) -> Arr:
        one: Any = ARCTopK(ratio=0.5, width=4, seed=seed)
        message: Any = next(
            one.exchange(NUMPY, bucket, np.ones(16, np.float32), state._replace(step=step), World(rank, 2))
        )
        assert isinstance(message, AllReduce) and message.array.shape == (4 * 4,)
        return np.array(message.array)

    np.testing.assert_array_equal(sketch(0, 0), sketch(1, 0))
    assert (sketch(0, 0) != sketch(0, 1)).any() and (sketch(0, 0) != sketch(0, 0, seed=1)).any()


def test_rows_that_cancel_are_not_chosen() -> None:
    """TopKC adds norms, and takes the rows whose sum is zero."""
    bucket = bucket_of((400,))
    x = normal(bucket, 1)[0]
    x[:200] *= 10
    xs = [x, np.concatenate([-x[:200], x[200:]])]
    for method, cancelled in ((ARCTopK(ratio=0.25, width=8), False), (TopKC(ratio=0.25, chunk=8), True)):
        states = [method.init(NUMPY, bucket, World(rank, 2)) for rank in range(2)]
        rows: Any = lockstep(NUMPY, method, bucket, [x.copy() for x in xs], states)[0].sent_indices
        assert (rows.rows < 25).all() == cancelled and (rows.rows >= 25).all() != cancelled


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_most_of_the_energy_arrives_at_any_scale(scale: float) -> None:
    """Rows of very different norms: with 4 numbers per row, the sketch finds nearly all of the best."""
    bucket, ranks = bucket_of((32_000,)), 4
    sizes = np.exp(2 * np.random.default_rng(0).standard_normal(500)).repeat(64)
    xs = [(x * sizes * scale).astype(np.float32) for x in normal(bucket, ranks)]
    method = ARCTopK(ratio=0.1, width=64)
    total = lockstep(NUMPY, method, bucket, xs, [method.init(NUMPY, bucket, World(0, ranks))] * ranks)[0].total
    exact = np.sum(np.divide(xs, scale), axis=0).reshape(500, 64)
    best = np.sort(np.sum(exact**2, axis=1))[-50:].sum()
    assert 0.9 * best < np.sum((total / scale).astype(np.float64) ** 2) <= best * (1 + 1e-5)


@pytest.mark.parametrize("params", [{"ratio": 0.0}, {"width": 0}, {"rank": 0}, {"seed": -1}])
def test_bad_parameters(params: Any) -> None:
    with pytest.raises(SpecError, match="is not allowed"):
        ARCTopK(**params)
