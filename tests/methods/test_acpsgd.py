"""ACP-SGD: its algorithm written out, and what its alternation comes to."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import FRAMEWORKS, bucket_of, normal, ops_of

from hvd_compress import LocalWorld
from hvd_compress.core.collectives import World
from hvd_compress.methods.acpsgd import ACPSGD
from hvd_compress.methods.powersgd import PowerSGD
from hvd_compress.methods.wrappers.error_feedback import ErrorFeedback
from hvd_compress.transport.lockstep import lockstep


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_literal_algorithm(framework: str) -> None:
    ops, bucket, method = ops_of(framework), bucket_of((10, 6), dtype="float64"), ErrorFeedback(ACPSGD(rank=2))
    states = [method.init(ops, bucket, World(0, 2)) for _ in range(2)]
    nothing, (_, *factors) = states[0]
    p, q = (np.asarray(leaf).reshape(-1, 2) for leaf in factors)
    for step in range(5):
        xs = normal(bucket, 2, seed=step)
        results = lockstep(ops, method, bucket, xs, states)
        states = [result.state._replace(residual=nothing) for result in results]
        ms = [x.reshape(10, 6) for x in xs]
        if step % 2 == 0:
            q = np.linalg.qr(q)[0]
            mine, p = [m @ q @ q.T for m in ms], sum(ms) @ q
        else:
            p = np.linalg.qr(p)[0]
            mine, q = [p @ p.T @ m for m in ms], np.sum(ms, axis=0).T @ p
        np.testing.assert_allclose(np.asarray(results[0].total).reshape(10, 6), p @ q.T, atol=1e-9)
        for result, m, sent in zip(results, ms, mine, strict=True):
            np.testing.assert_allclose(np.asarray(result.state.residual).reshape(10, 6), m - sent, atol=1e-9)


def test_two_steps_are_a_power_iteration() -> None:
    """On a matrix that stays it comes to the best approximation, as PowerSGD does with twice the traffic."""
    bucket, method, ops = bucket_of((64, 48), dtype="float64"), ACPSGD(rank=4), ops_of("numpy")
    u, _, vt = np.linalg.svd(np.random.default_rng(0).standard_normal((64, 48)))
    spectrum = 0.7 ** np.arange(48)
    matrix = (u[:, :48] * spectrum) @ vt
    state = method.init(ops, bucket, World(0, 1))
    for _ in range(120):
        (result,) = lockstep(ops, method, bucket, [matrix.ravel()], [state])
        state = result.state
    np.testing.assert_allclose(
        np.linalg.norm(result.total.reshape(64, 48) - matrix), np.linalg.norm(spectrum[4:]), rtol=1e-6
    )


def test_one_round_with_one_factor_in_each_step() -> None:
    world = LocalWorld("acpsgd:rank=2", size=2)
    rng = np.random.default_rng(0)
    sent = [0]
    for _ in range(4):
        world.step([rng.standard_normal((30, 20)) for _ in range(2)])
        sent.append(world.bytes_sent)
    assert world.rounds == 4
    assert np.diff(sent).tolist() == [30 * 2 * 8, 20 * 2 * 8] * 2


@pytest.mark.parametrize("kind", [PowerSGD, ACPSGD])
def test_rank_by_target_ratio(kind: type[PowerSGD | ACPSGD]) -> None:
    """The largest rank whose factors are as small as wanted; 1 where there is none."""
    method = kind(target_ratio=10)
    assert method.factor((1000, 500)).rank == 1000 * 500 // (10 * 1500)
    assert method.factor((10, 10)).rank == 1
    assert kind(target_ratio=1, min_gain=0).factor((8, 8)).rank == 4


def test_more_iterations_come_closer() -> None:
    bucket, ops = bucket_of((60, 50), dtype="float64"), ops_of("numpy")
    (x,) = normal(bucket, 1)
    errors = []
    for iterations in (1, 2, 4, 8):
        method = PowerSGD(rank=4, iterations=iterations)
        (result,) = lockstep(ops, method, bucket, [x], [method.init(ops, bucket, World(0, 1))])
        errors.append(np.linalg.norm(result.total - x))
    best = np.linalg.norm(np.linalg.svd(x.reshape(60, 50))[1][4:])
    assert sorted(errors, reverse=True) == errors and best < errors[-1] < 1.05 * best
