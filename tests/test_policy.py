"""When and where: dense at first, milder at first, and never on what is too small."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import FRAMEWORKS, bucket_of, normal, ops_of

from hvd_compress import LocalWorld, parse
from hvd_compress.errors import SpecError
from hvd_compress.local import lockstep
from hvd_compress.memory import ErrorFeedback
from hvd_compress.methods.cast import Dense, Half
from hvd_compress.methods.powersgd import PowerSGD
from hvd_compress.methods.topk import TopK
from hvd_compress.policy import Schedule, Selective, Stage


@pytest.mark.parametrize(
    ("shape", "compressed"),
    [((64, 64), True), ((1024, 1), True), ((1023,), False), ((5000,), False), ((31, 33), False), ((), False)],
)
def test_small_tensors_and_vectors_stay_dense(shape: tuple[int, ...], compressed: bool) -> None:
    method = Selective(TopK())
    assert method.route("w", shape) == (TopK() if compressed else Dense())


def test_options_move_the_border() -> None:
    method = Selective(TopK(), Half(), min_size=0, vectors=True)
    for shape in [(1,), (5000,), (2, 2)]:
        assert method.route("w", shape) == TopK()
    assert Selective(TopK(), Half(), min_size=10).route("w", (3, 3)) == Half()


def test_a_method_that_gains_nothing_is_not_used() -> None:
    method = Selective(ErrorFeedback(PowerSGD(rank=8)), min_size=0)
    assert method.route("w", (64, 64)) == ErrorFeedback(PowerSGD(rank=8))
    assert method.route("w", (20, 20)) == Dense()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_start_is_dense_and_leaves_no_residual(framework: str) -> None:
    ops, bucket = ops_of(framework), bucket_of((50, 40))
    method = parse("topk:ratio=0.01,start=2").core
    states = [method.init(ops, bucket) for _ in range(2)]
    for step in range(4):
        xs = normal(bucket, 2, seed=step)
        results = lockstep(ops, method, bucket, [x.copy() for x in xs], states)
        states = [result.state for result in results]
        total, residual = np.asarray(results[0].total), np.asarray(states[0].inner.residual)
        if step < 2:
            np.testing.assert_array_equal(total, xs[0] + xs[1])
            assert not residual.any()
        else:
            assert np.count_nonzero(total) <= 40
            assert residual.any()
    assert int(states[0].step) == 4


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_warmup_sends_less_and_less(framework: str) -> None:
    ops, bucket = ops_of(framework), bucket_of((100, 100))
    method = parse("topk:ratio=0.00001,warmup=4,feedback=off").core
    state, sent = method.init(ops, bucket), []
    for step in range(6):
        (result,) = lockstep(ops, method, bucket, normal(bucket, 1, seed=step), [state])
        state = result.state
        sent.append(np.count_nonzero(np.asarray(result.total)))
    assert sent == [1000, 100, 10, 1, 1, 1]


def test_nothing_is_lost_through_start_and_warmup() -> None:
    world = LocalWorld("topk:ratio=0.01,start=3,warmup=8", size=2)
    rng, got, true = np.random.default_rng(0), 0.0, 0.0
    for _ in range(20):
        grads = [rng.standard_normal((40, 40)) for _ in range(2)]
        got, true = got + world.step(grads)[0], true + np.mean(grads, axis=0)
    kept = np.mean([world.residual(rank)[""] for rank in range(2)], axis=0)
    np.testing.assert_allclose(got + kept, true, atol=1e-12)


@pytest.mark.parametrize("ends", [[], [0], [3, 3], [5, 2]])
def test_stages_must_grow(ends: list[int]) -> None:
    with pytest.raises(SpecError, match="stages end at the steps"):
        Schedule(TopK(), tuple(Stage(end, Dense()) for end in ends))
