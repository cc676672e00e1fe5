"""The public simulator: what it returns, counts and refuses."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import LocalWorld
from hvd_compress.core.collectives import AllGather, AllReduce, AllToAll, Broadcast
from hvd_compress.errors import ExchangeError, GradientError
from hvd_compress.transport.lockstep import perform


def test_a_model_follows_the_policy_and_a_bare_array_does_not() -> None:
    rng = np.random.default_rng(0)
    grads = {name: [rng.standard_normal(shape) for _ in range(2)] for name, shape in [("w", (50, 40)), ("b", (9,))]}
    means = LocalWorld("topk:ratio=0.001", size=2).step(grads)
    np.testing.assert_allclose(means["b"][1], np.mean(grads["b"], axis=0))
    assert np.count_nonzero(means["w"][1]) <= 4
    assert np.count_nonzero(LocalWorld("topk:ratio=0.001", size=2).step(grads["b"])[0]) <= 2


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_results_have_the_shape_and_dtype_of_the_input(dtype: str) -> None:
    world = LocalWorld("powersgd:rank=1", size=3)
    for mean in world.step([np.ones((4, 3, 2), dtype)] * 3):
        assert mean.shape == (4, 3, 2) and mean.dtype == dtype
        np.testing.assert_allclose(mean, 1, rtol=1e-3)


def test_inputs_are_left_alone() -> None:
    grads = [np.arange(6.0), np.arange(6.0)]
    LocalWorld("topk:ratio=0.5", size=2).step(grads)
    LocalWorld("none", size=2).step(grads)
    for grad in grads:
        np.testing.assert_array_equal(grad, np.arange(6.0))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.2", "int8", "powersgd:rank=1", "randomk:ratio=0.2"])
def test_a_non_finite_gradient_is_seen_by_all_and_changes_nothing(spec: str, bad: float) -> None:
    """The world that saw a bad step goes on exactly as the one that did not."""
    rng = np.random.default_rng(0)
    disturbed, calm = (LocalWorld(spec, size=2) for _ in range(2))
    for step in range(6):
        grads = [rng.standard_normal((6, 7)) for _ in range(2)]
        if step == 3:
            spoilt = [grads[0], grads[1].copy()]
            spoilt[1][2, 2] = bad
            assert all(np.isnan(mean).all() for mean in disturbed.step(spoilt))
        for a, b in zip(disturbed.step(grads), calm.step(grads), strict=True):
            np.testing.assert_array_equal(a, b)
    assert disturbed.steps == calm.steps == 6


def test_counts() -> None:
    world = LocalWorld("int8:block=4", size=2, merge="layer")
    world.step({"w": [np.ones((40, 40), np.float32)] * 2, "b": [np.ones(7, np.float32)] * 2})
    assert world.rounds == 3
    assert world.bytes_sent == 400 * 4 + 1600 + 7 * 4


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ([np.zeros(3)], r"one array per rank \(2\).*got 1"),
        ([np.zeros(3), np.zeros(4)], "equal shape"),
        ([np.zeros(3), np.zeros(3, np.float32)], "equal shape and dtype"),
        ([np.zeros(3, int)] * 2, "dtype int64, which cannot be compressed; allowed: float16, bfloat16, float32"),
        ([np.zeros(3, complex)] * 2, "dtype complex128"),
        ({"w": [np.zeros(3, bool)] * 2}, "the gradient of 'w' has dtype bool"),
    ],
)
def test_bad_gradients(grads: object, message: str) -> None:
    with pytest.raises(GradientError, match=message):
        LocalWorld("topk", size=2).step(grads)


def test_gradients_must_stay_the_same() -> None:
    world = LocalWorld("topk", size=1)
    world.step([np.ones((3, 3))])
    with pytest.raises(GradientError, match="have changed"):
        world.step([np.ones((3, 4))])


def test_scalars_and_empty_arrays() -> None:
    world = LocalWorld("topk:ratio=0.5", size=2)
    means = world.step({"s": [np.array(1.0), np.array(3.0)], "e": [np.zeros((0, 3))] * 2})
    assert means["s"][0] == 2.0 and means["s"][0].shape == ()
    assert means["e"][0].shape == (0, 3)


def test_world_of_none() -> None:
    with pytest.raises(ExchangeError, match="at least 1 rank"):
        LocalWorld("topk", size=0)


def test_collectives() -> None:
    a, b = np.array([1, 5]), np.array([4, 2])
    assert [r.tolist() for r in perform([AllReduce(a), AllReduce(b)], 2)] == [[5, 7]] * 2
    assert [r.tolist() for r in perform([AllReduce(a, "max"), AllReduce(b, "max")], 2)] == [[4, 5]] * 2
    assert [r.tolist() for r in perform([AllGather(a), AllGather(b)], 2)] == [[[1, 5], [4, 2]]] * 2
    pairs = [np.array([[0, 1], [2, 3]]), np.array([[4, 5], [6, 7]])]
    assert [r.tolist() for r in perform([AllToAll(p) for p in pairs], 2)] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert [r.tolist() for r in perform([Broadcast(a, 1), Broadcast(b, 1)], 2)] == [[4, 2]] * 2


def test_ranks_must_ask_for_the_same() -> None:
    a = np.zeros(2)
    for other in (AllGather(a), AllReduce(a, "max"), AllReduce(np.zeros(3)), AllReduce(a.astype(np.float32))):
        with pytest.raises(ExchangeError, match="the same collective"):
            perform([AllReduce(a), other], 2)


def test_gradients_by_rank_are_told_their_form() -> None:
    with pytest.raises(GradientError, match=r"as \{name: \[array of rank 0"):
        LocalWorld("topk", 2).step([{"w": np.ones(4)}, {"w": np.ones(4)}])


class Clock:
    """A simulated time: that of the bytes and rounds of a world, on a link of some bytes per second."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.world: LocalWorld | None = None
        self._now, self._bytes, self._rounds = 0.0, 0, 0

    def __call__(self) -> float:
        if self.world is not None:
            self._now += (self.world.bytes_sent - self._bytes) / self.rate + 1e-3 * (self.world.rounds - self._rounds)
            self._bytes, self._rounds = self.world.bytes_sent, self.world.rounds
        return self._now


def auto_world(rate: float) -> tuple[LocalWorld, Clock]:
    clock = Clock(rate)
    clock.world = LocalWorld("auto", 2, clock=clock)
    return clock.world, clock


def steps(world: LocalWorld, number: int) -> str:
    """Make steps of random gradients; return the spec of the method that is chosen afterwards."""
    rng = np.random.default_rng(0)
    for _ in range(number):
        grads = {name: list(rng.standard_normal((2, 64, 64)).astype(np.float32)) for name in ("a", "b")}
        means = world.step(grads)
        assert all(np.array_equal(mean[0], mean[1]) for mean in means.values())
    assert world.race is not None
    return world.race.candidates[world.race.choice].spec


@pytest.mark.parametrize(("rate", "spec"), [(1e5, "qsgd"), (1e12, "none")])
def test_auto_chooses_by_the_link(rate: float, spec: str) -> None:
    world, _ = auto_world(rate)
    assert steps(world, 80) == spec


def test_auto_follows_the_link() -> None:
    world, clock = auto_world(1e12)
    assert steps(world, 80) == "none"
    clock.rate = 1e5
    assert steps(world, 150) == "qsgd"


def test_auto_excludes_what_rounds_too_much() -> None:
    """Of gradients with one large value among many small ones, four bits keep little more than that value."""
    world, _ = auto_world(1e5)
    gradient = np.full((64, 64), 0.05, np.float32)
    gradient[:, 0] = 1.0
    for _ in range(80):
        world.step({"w": [gradient, gradient]})
    assert world.race is not None
    runners = {one.spec: one for one in world.race.comparisons[0].runners}
    assert runners["qsgd"].verdict == runners["qsgd:twoway=on"].verdict == "its error is above 0.1"
    assert runners["qsgd:bits=8,twoway=on"].verdict == "chosen"
