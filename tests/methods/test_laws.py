"""Laws that every method obeys, on the arrays of every framework."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import FRAMEWORKS, bucket_of, leaves, normal, ops_of

from hvd_compress import LocalWorld, parse
from hvd_compress.errors import SpecError
from hvd_compress.local import lockstep
from hvd_compress.memory import ErrorFeedback
from hvd_compress.methods import REGISTRY
from hvd_compress.methods.base import Method
from hvd_compress.state import flatten, unflatten

SPECS = [
    "none",
    "fp16",
    "topk:ratio=0.1",
    "topk:ratio=0.1,values=fp16",
    "randomk:ratio=0.1",
    "randomk:ratio=0.1,unbiased=on",
    "int8:block=64",
    "int8:bits=16,block=64",
    "powersgd:rank=2",
]
BUCKET = bucket_of((20, 30), (4, 3, 5, 5), (1,), (7,))


def core(spec: str, feedback: bool = False) -> Method:
    """The bare method of a spec, or the method in error feedback."""
    method = parse(spec).core
    method = method.inner if isinstance(method, ErrorFeedback) else method
    return ErrorFeedback(method) if feedback else method


def test_all_methods_are_under_test() -> None:
    assert {spec.partition(":")[0] for spec in SPECS} == set(REGISTRY)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("spec", SPECS)
def test_ranks_agree_bit_for_bit(spec: str, ranks: int, framework: str) -> None:
    ops, method = ops_of(framework), core(spec)
    xs, states = normal(BUCKET, ranks), [method.init(ops, BUCKET) for _ in range(ranks)]
    for _ in range(2):
        results = lockstep(ops, method, BUCKET, xs, states)
        states = [result.state for result in results]
        totals = [np.asarray(result.total) for result in results]
        assert totals[0].shape == (BUCKET.numel,) and totals[0].dtype == np.float32
        for total in totals[1:]:
            np.testing.assert_array_equal(total, totals[0])


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
@pytest.mark.parametrize("spec", SPECS)
def test_frameworks_agree_with_numpy(spec: str, framework: str) -> None:
    """Two steps with error feedback where there is one: same totals and states up to rounding."""
    method = core(spec, feedback=core(spec).can_retain)
    outcomes = []
    for name in ("numpy", framework):
        ops = ops_of(name)
        states = [method.init(ops, BUCKET) for _ in range(3)]
        for step in range(2):
            results = lockstep(ops, method, BUCKET, normal(BUCKET, 3, seed=step), states)
            states = [result.state for result in results]
        outcomes.append((np.asarray(results[1].total), leaves(states[1])))
    (total, state), (other_total, other_state) = outcomes
    np.testing.assert_allclose(total, other_total, rtol=1e-5, atol=2e-5)
    assert state.keys() == other_state.keys()
    for path, leaf in state.items():
        if path != "inner.q":  # the sign of orthonormal columns is free
            np.testing.assert_allclose(leaf, other_state[path], rtol=1e-5, atol=2e-5, err_msg=path)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("spec", [spec for spec in SPECS if core(spec).can_retain])
def test_sent_and_residual_make_up_the_gradient(spec: str, framework: str) -> None:
    """With one rank the total is what was sent: total + residual = gradient + residual before."""
    ops, method = ops_of(framework), core(spec, feedback=True)
    state = method.init(ops, BUCKET)
    for step in range(3):
        (x,) = normal(BUCKET, 1, seed=step)
        before = np.asarray(state.residual).copy()
        (result,) = lockstep(ops, method, BUCKET, [x], [state])
        state = result.state
        np.testing.assert_allclose(np.asarray(result.total) + np.asarray(state.residual), x + before, atol=2e-6)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if core(spec).can_retain])
def test_residuals_telescope(spec: str) -> None:
    """Over many steps and ranks: what all got, plus what all kept, is the sum of all gradients."""
    world = LocalWorld(core(spec, feedback=True), size=3)
    rng = np.random.default_rng(0)
    got, true = np.zeros((40, 25)), np.zeros((40, 25))
    for _ in range(50):
        grads = [rng.standard_normal((40, 25)) for _ in range(3)]
        got += world.step(grads)[0]
        true += np.mean(grads, axis=0)
    kept = np.mean([world.residual(rank)[""] for rank in range(3)], axis=0)
    # fp16 is summed in 16 bits on the way, and what that rounding takes away no rank can know
    atol = 50 * 4 * 2**-11 if spec == "fp16" else 1e-9
    np.testing.assert_allclose(got + kept, true, atol=atol)
    assert np.abs(kept).max() > 1e-6  # something was kept back: the law did not hold for want of compression


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "spec", ["none", "topk:ratio=1", "randomk:ratio=1", "randomk:ratio=1,unbiased=on", "powersgd:rank=99"]
)
def test_without_compression_it_is_the_identity(spec: str, framework: str) -> None:
    ops, method = ops_of(framework), core(spec)
    xs = normal(BUCKET, 3)
    results = lockstep(ops, method, BUCKET, xs, [method.init(ops, BUCKET) for _ in xs])
    atol = 1e-5 if "powersgd" in spec else 0
    np.testing.assert_allclose(np.asarray(results[0].total), sum(xs), rtol=0, atol=atol)
    if method.can_retain:
        np.testing.assert_allclose(np.asarray(method.retain(ops, ops.constant(xs[0]), results[0].sent)), 0, atol=atol)


@pytest.mark.parametrize("spec", ["randomk:ratio=0.1,unbiased=on", "int8:block=64", "int8:bits=16,block=64"])
def test_unbiased_methods_are_unbiased(spec: str) -> None:
    """The mean over many draws is within 5 standard errors of the truth, and so is the mean of all coordinates."""
    method, bucket, draws = core(spec), bucket_of((200,)), 4000
    ops, xs = ops_of("numpy"), normal(bucket, 2)
    states = [method.init(ops, bucket) for _ in xs]
    sums = np.zeros((2, 200))
    for _ in range(draws):
        results = lockstep(ops, method, bucket, xs, states)
        states = [result.state for result in results]
        error = results[0].total.astype(np.float64) - sum(x.astype(np.float64) for x in xs)
        sums += error, error**2
    mean, spread = sums[0] / draws, np.sqrt(sums[1] / draws)
    assert spread.min() > 1e-8
    z = mean / spread * draws**0.5
    assert np.abs(z).max() < 5
    assert 0.8 < z.std() < 1.2  # standard normal: the errors are neither shared by all draws nor suspiciously small


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_counted_are_the_payload(spec: str) -> None:
    """40 x 25 = 1000 float32 coordinates; the payload follows from the method's definition."""
    world = LocalWorld(core(spec), size=2)
    world.step([np.ones((40, 25), np.float32)] * 2)
    blocks = -(-1000 // 64)
    assert (
        world.bytes_sent
        == {
            "none": 4000,
            "fp16": 2000,
            "topk:ratio=0.1": 100 * (4 + 2),
            "topk:ratio=0.1,values=fp16": 100 * (2 + 2),
            "randomk:ratio=0.1": 100 * 4,
            "randomk:ratio=0.1,unbiased=on": 100 * 4,
            "int8:block=64": blocks * (4 + 64),
            "int8:bits=16,block=64": blocks * (4 + 128),
            "powersgd:rank=2": 2 * (40 + 25) * 4,
        }[spec]
    )


@pytest.mark.parametrize("spec", SPECS)
def test_states_come_back_from_their_leaves(spec: str) -> None:
    method, ops = core(spec, feedback=core(spec).can_retain), ops_of("numpy")
    state = method.init(ops, BUCKET)
    for step in range(2):
        (result,) = lockstep(ops, method, BUCKET, normal(BUCKET, 1, seed=step), [state])
        state = result.state
    again = unflatten(method.init(ops, BUCKET), flatten(state))
    assert type(again) is type(state)
    x = normal(BUCKET, 1, seed=9)
    (first,), (second,) = (lockstep(ops, method, BUCKET, [a.copy() for a in x], [s]) for s in (state, again))
    np.testing.assert_array_equal(first.total, second.total)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("spec", SPECS)
def test_states_are_never_overwritten(spec: str, framework: str) -> None:
    """A step that is thrown away must leave the state that it started from."""
    ops, method = ops_of(framework), core(spec, feedback=core(spec).can_retain)
    state = method.init(ops, BUCKET)
    (result,) = lockstep(ops, method, BUCKET, normal(BUCKET, 1), [state])
    state, before = result.state, {path: leaf.copy() for path, leaf in leaves(result.state).items()}
    lockstep(ops, method, BUCKET, normal(BUCKET, 1, seed=1), [state])
    for path, leaf in leaves(state).items():
        np.testing.assert_array_equal(leaf, before[path], err_msg=path)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shapes", [((1,),), ((7,),), ((1000,),), ((30, 40),), ((4, 3, 3, 3),), ((1, 1),)])
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("spec", SPECS)
def test_any_shape_and_precision(spec: str, framework: str, shapes: tuple[tuple[int, ...], ...], dtype: str) -> None:
    ops, bucket, method = ops_of(framework), bucket_of(*shapes, dtype=dtype), core(spec, feedback=core(spec).can_retain)
    xs = normal(bucket, 2)
    results = lockstep(ops, method, bucket, xs, [method.init(ops, bucket) for _ in xs])
    total = np.asarray(results[0].total)
    assert total.shape == (bucket.numel,) and total.dtype == dtype
    assert np.isfinite(total).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.0, 1e-42, 1e30])
def test_constant_gradients(spec: str, framework: str, value: float) -> None:
    """All equal, all zero, denormal, huge: no division by zero and nothing out of range."""
    ops, method = ops_of(framework), core(spec)
    xs = [np.full(BUCKET.numel, value, np.float32)] * 2
    total = np.asarray(lockstep(ops, method, BUCKET, xs, [method.init(ops, BUCKET) for _ in xs])[0].total)
    if spec == "fp16" and value == 1e30:
        assert np.isinf(total).all()  # as with Horovod's own fp16: visible to a loss scaler
    else:
        assert np.isfinite(total).all()
        scale = 20 if "unbiased" in spec else 1
        assert (np.abs(total) <= 2.0001 * abs(np.float32(value)) * scale + 1e-43).all()


def test_feedback_is_refused_where_nothing_is_kept() -> None:
    for spec in ("none", "randomk:unbiased=on"):
        with pytest.raises(SpecError, match="feedback=on is not possible"):
            ErrorFeedback(core(spec))
