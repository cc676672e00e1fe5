"""Laws that every method obeys, on the arrays of every framework."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from catalogue import EXAMPLES, bare, each_way, one_in
from worlds import FRAMEWORKS, Arr, bucket_of, leaves, normal, ops_of

from hvd_compress import LocalWorld, parse
from hvd_compress.checkpoint.resharding import slices
from hvd_compress.core.collectives import State, World
from hvd_compress.core.method import Method
from hvd_compress.core.state_tree import Per, Role, flatten, kinds, unflatten
from hvd_compress.errors import SpecError
from hvd_compress.methods import REGISTRY
from hvd_compress.methods.cast import Dense
from hvd_compress.methods.lowrank import LowRank
from hvd_compress.methods.wrappers.alternatives import Phases
from hvd_compress.methods.wrappers.error_feedback import EF21, ErrorFeedback
from hvd_compress.methods.wrappers.hierarchy import Hierarchical
from hvd_compress.methods.wrappers.schedule import Delayed, schedule
from hvd_compress.ops.torch_devices import torch_ops
from hvd_compress.ops.totals import dense
from hvd_compress.transport.lockstep import lockstep, run_lockstep_encoded, worlds

SPECS = list(EXAMPLES)
BUCKET = bucket_of((20, 30), (4, 3, 5, 5), (1,), (7,))


def core(spec: str, feedback: bool = False) -> Method:
    """The bare method of a spec, or the method in error feedback."""
    return ErrorFeedback(bare(spec)) if feedback else bare(spec)


RETAINING = [spec for spec in SPECS if core(spec).supports_feedback]

SHAPES: list[tuple[int, ...]] = [(0,), (), (1,), (7,), (1000,), (30, 40), (4, 3, 3, 3), (1, 1)]
DTYPES = ["float16", "float32", "float64"]
STEPS = 50


EACH_WAY = each_way(SPECS, by_method=False)
"""One for each way to communicate."""


def on(frameworks: list[str], specs: list[str]) -> pytest.MarkDecorator:
    """Specs on frameworks; with kernels on numpy only some, as their primitives are compared with those of numpy."""
    cases = [(spec, framework) for framework in frameworks for spec in specs]
    return pytest.mark.parametrize(
        ("spec", "framework"),
        [(spec, framework) for spec, framework in cases if framework != "compiled" or spec in EACH_WAY],
    )


ALL = FRAMEWORKS


@pytest.mark.parametrize(
    ("spec", "ranks", "framework"),
    [
        *one_in(3, itertools.product(SPECS, (1, 3), ["numpy"])),
        *one_in(2, itertools.product(SPECS, (2,), ["torch"])),
        *(pytest.param(spec, ranks, "numpy", marks=pytest.mark.slow) for spec in EACH_WAY for ranks in (4, 7)),
        *((spec, 2, "compiled") for spec in EACH_WAY[::2]),
    ],
)
def test_any_shape_precision_and_number_of_ranks(spec: str, ranks: int, framework: str) -> None:
    """All ranks get equal bits, of the shape and dtype of the input; each tensor in a bucket of its own.

    Each shape meets each dtype, with another number of ranks.
    """
    rng = np.random.default_rng(0)
    dtypes = [DTYPES[(number + ranks) % len(DTYPES)] for number in range(len(SHAPES))]
    grads = {
        f"{shape} {dtype}": [np.asarray(rng.standard_normal(shape), dtype) for _ in range(ranks)]
        for shape, dtype in zip(SHAPES, dtypes, strict=True)
    }
    world = LocalWorld(core(spec, feedback=spec in RETAINING), ranks, "layer", ops=ops_of(framework))
    world.step(grads)
    means = world.step(grads)
    for name, arrays in grads.items():
        for mean in means[name]:
            assert (mean.shape, mean.dtype) == (arrays[0].shape, arrays[0].dtype)
            assert np.isfinite(mean).all(), name
            np.testing.assert_array_equal(mean, means[name][0], err_msg=name)


@pytest.mark.parametrize("spec", SPECS)
def test_gradients_get_the_sum_however_it_is_decoded(spec: str) -> None:
    """A sum that is decoded part by part, straight into gradients, is the one that is decoded as a whole."""
    ops, bucket = torch_ops("cpu"), bucket_of((400, 700), (70_001,))  # three parts
    method = core(spec)
    states = [method.init(ops, bucket, world) for world in worlds(2)]
    first, _ = run_lockstep_encoded(ops, method, bucket, normal(bucket, 2), states)
    total = first.ended.total
    gradients = [torch.empty(shape) for shape in bucket.shapes]
    assert np.isfinite(ops.deliver(total, list(zip(slices(bucket.sizes), gradients, strict=True)), 1.0))
    whole = np.asarray(dense(ops, total))
    np.testing.assert_allclose(np.concatenate([np.ravel(one) for one in gradients]), whole, rtol=1e-6, atol=1e-6)


def disagreement(spec: str, a: Arr, b: Arr) -> float:
    """How far apart two frameworks are: the share of elements that differ, or with rotations the relative distance.

    Where a number is about to be rounded, another order of summation may push it to the other side.
    """
    if bare(spec).card.rotates:
        return float(np.linalg.norm(a - b) / np.linalg.norm(a)) if a.any() else float(b.any())
    return float((~np.isclose(a, b, rtol=1e-4, atol=2e-5)).mean()) if a.size else 0.0


@on(ALL[1:], SPECS)
def test_frameworks_agree_with_numpy(spec: str, framework: str) -> None:
    """Two steps with error feedback where there is one: same totals and states up to rounding."""
    method = core(spec, feedback=spec in RETAINING)
    outcomes = []
    for name in ("numpy", framework):
        ops = ops_of(name)
        states = [method.init(ops, BUCKET, World(0, 3)) for _ in range(3)]
        for step in range(2):
            results = lockstep(ops, method, BUCKET, normal(BUCKET, 3, seed=step), states)
            states = [result.state for result in results]
        outcomes.append((np.asarray(results[1].total), leaves(states[1])))
    (total, state), (other_total, other_state) = outcomes
    assert disagreement(spec, total, other_total) < 0.01
    assert state.keys() == other_state.keys()
    for path, leaf in state.items():
        if path not in ("inner.q", "inner.p"):  # the sign of orthonormal columns is free
            assert leaf.dtype == other_state[path].dtype, path
            assert disagreement(spec, leaf, other_state[path]) < 0.01, path


@on(ALL[:2], [spec for spec in RETAINING if EXAMPLES[spec].total in ("exact", "rounded", "senders")])
def test_sent_and_residual_make_up_the_gradient(spec: str, framework: str) -> None:
    """With one rank the total is what was sent: total + residual = gradient + residual before."""
    ops, method = ops_of(framework), core(spec, feedback=True)
    state = method.init(ops, BUCKET, World(0, 1))
    for step in range(3):
        (x,) = normal(BUCKET, 1, seed=step)
        before = np.asarray(state.residual).copy()
        (result,) = lockstep(ops, method, BUCKET, [x], [state])
        state = result.state
        np.testing.assert_allclose(np.asarray(result.total) + np.asarray(state.residual), x + before, atol=4e-6)


@pytest.mark.parametrize(
    "spec", one_in(4, [spec for spec in RETAINING if EXAMPLES[spec].total not in ("lossy", "senders")])
)
def test_residuals_telescope(spec: str) -> None:
    """Over many steps: what all got, plus what the ranks and the servers kept, is the sum of all gradients."""
    bucket, method, ops = bucket_of((40, 25), dtype="float64"), core(spec, feedback=True), ops_of("numpy")
    states = [method.init(ops, bucket, World(0, 3)) for _ in range(3)]
    rng = np.random.default_rng(0)
    got, true = np.zeros(1000), np.zeros(1000)
    for _ in range(STEPS):
        xs = [rng.standard_normal(1000) for _ in range(3)]
        true += sum(xs)
        results = lockstep(ops, method, bucket, xs, states)
        states = [result.state for result in results]
        got += results[0].total
    kept = sum(state.residual for state in states)
    if EXAMPLES[spec].total == "served":  # an error that is not among the residuals of the ranks
        kept = kept + np.concatenate([state.inner.served for state in states])[:1000]
    atol = STEPS * 8 * 2**-8 if EXAMPLES[spec].total == "rounded" else 1e-8  # no rank can keep what that takes away
    np.testing.assert_allclose(got + kept, true, atol=atol)
    assert np.abs(kept).max() > 1e-6  # something was kept back: the law did not hold for want of compression


def held(state: State) -> float:
    """The largest magnitude of what a state keeps back of the gradients."""
    back = {path for path, kind in kinds(state).items() if kind.residual or kind.role is Role.SERVED}
    return max((float(np.abs(leaf).max()) for path, leaf in leaves(state).items() if path in back), default=0.0)


ENDING_DENSE: dict[str, Callable[[Method], Method]] = {
    "every=": lambda method: schedule(method, every=3),
    "phases=": lambda method: Phases(((0, method), (2, Dense()))),
    "delay=": lambda method: Delayed(method, 3),
}


@pytest.mark.parametrize(
    ("spec", "way", "size", "local_size"),
    one_in(
        4,
        [
            *((spec, way, 3, 1) for way in ENDING_DENSE for spec in SPECS),
            *((spec, "every=", 4, 2) for spec in EACH_WAY),
        ],
    ),
)
def test_after_a_dense_step_nothing_is_outstanding(spec: str, way: str, size: int, local_size: int) -> None:
    """All that was given has been delivered, unless the method drops some of it by design."""
    method = Hierarchical(bare(spec)) if local_size > 1 else bare(spec)
    memory = ErrorFeedback(method) if method.supports_feedback else method
    bucket, ops, ending = bucket_of((40, 25), dtype="float64"), ops_of("numpy"), ENDING_DENSE[way](memory)
    states = [ending.init(ops, bucket, world) for world in worlds(size, local_size)]
    rng = np.random.default_rng(0)
    missing = np.zeros(1000)
    for _ in range(3):
        xs = [rng.standard_normal(1000) for _ in range(size)]
        missing += sum(xs)
        results = lockstep(ops, ending, bucket, xs, states, local_size=local_size)
        states = [result.state for result in results]
        missing -= results[0].total
    assert max(map(held, states)) == 0
    if spec in RETAINING and EXAMPLES[spec].total in ("exact", "served"):
        np.testing.assert_allclose(missing, 0, atol=1e-8)


def test_a_dense_step_of_ef21_makes_errors_of_servers_obsolete() -> None:
    """A gradient that stays as it is changes nothing in the step after."""
    bucket, ops, method = bucket_of((40, 25)), ops_of("numpy"), EF21(bare("efsignsgd:twoway=on"))
    memory = schedule(method, every=2)
    states = [memory.init(ops, bucket, world) for world in worlds(2)]
    xs = normal(bucket, 2)
    for step in range(3):
        results = lockstep(ops, memory, bucket, [x.copy() for x in xs], states)
        states = [result.state for result in results]
        if step:
            np.testing.assert_allclose(results[0].total, sum(xs), atol=1e-6)


@on(ALL, [spec for cls in REGISTRY.values() for spec in cls.card.lossless])
def test_without_compression_it_is_the_identity(spec: str, framework: str) -> None:
    ops, method = ops_of(framework), core(spec)
    xs = normal(BUCKET, 3)
    results = lockstep(ops, method, BUCKET, xs, [method.init(ops, BUCKET, World(0, len(xs))) for _ in xs])
    atol = 1e-5 if isinstance(method, LowRank) else 1e-6
    np.testing.assert_allclose(np.asarray(results[0].total), sum(xs), rtol=0, atol=atol)
    if method.supports_feedback:
        late = ErrorFeedback(method)
        results = lockstep(ops, late, BUCKET, xs, [late.init(ops, BUCKET, World(0, len(xs))) for _ in xs])
        np.testing.assert_allclose(np.asarray(results[0].state.residual), 0, atol=atol)


@on(ALL[:2], [spec for spec in RETAINING if "twoway=on" not in spec])
def test_what_is_left_is_the_input_without_what_was_sent(spec: str, framework: str) -> None:
    """To keep it changes nothing else. One rank gets what it has sent."""
    ops, method = ops_of(framework), core(spec)
    feedback = ErrorFeedback(method)
    (x,) = normal(BUCKET, 1)
    (plain,) = lockstep(ops, method, BUCKET, [x.copy()], [method.init(ops, BUCKET, World(0, 1))])
    (kept,) = lockstep(ops, feedback, BUCKET, [x.copy()], [feedback.init(ops, BUCKET, World(0, 1))])
    np.testing.assert_array_equal(np.asarray(kept.total), np.asarray(plain.total))
    np.testing.assert_allclose(np.asarray(kept.state.residual), x - np.asarray(plain.total), rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [spec for spec, example in EXAMPLES.items() if example.unbiased])
def test_unbiased_methods_are_unbiased(spec: str) -> None:
    """The mean over 1000 draws is within 5 standard errors of the truth, and so is the mean of all coordinates.

    A step has four draws of each coordinate: the gradient is there four times.
    """
    times, steps = 4, 250
    method, bucket, draws = core(spec), bucket_of((200 * times,)), times * steps
    ops, xs = ops_of("numpy"), [np.tile(x, times) for x in normal(bucket_of((200,)), 2)]
    states = [method.init(ops, bucket, World(0, len(xs))) for _ in xs]
    sums = np.zeros((2, 200))
    for _ in range(steps):
        results = lockstep(ops, method, bucket, xs, states)
        states = [result.state for result in results]
        error = (results[0].total.astype(np.float64) - sum(x.astype(np.float64) for x in xs)).reshape(times, 200)
        sums += error.sum(axis=0), (error**2).sum(axis=0)
    mean, spread = sums[0] / draws, np.sqrt(sums[1] / draws)
    assert spread.min() > 1e-8
    z = mean / spread * draws**0.5
    assert np.abs(z).max() < 5
    assert 0.8 < z.std() < 1.2  # standard normal: the errors are neither shared by all draws nor suspiciously small


@pytest.mark.parametrize("spec", [spec for spec, example in EXAMPLES.items() if example.payload is not None])
def test_bytes_counted_are_the_payload(spec: str) -> None:
    world = LocalWorld(core(spec), size=2)
    rng = np.random.default_rng(0)
    world.step([rng.standard_normal((40, 25)).astype(np.float32) for _ in range(2)])
    assert world.bytes_sent == EXAMPLES[spec].payload


@pytest.mark.parametrize("spec", ["threshold:threshold=1", "dgc:ratio=0.1,sample=0.2", "sidco:ratio=0.1"])
def test_ragged_payloads_say_how_many_coordinates_they_have(spec: str) -> None:
    """32 bits for the number, then 32 + 16 bits for each; with one rank that is what changes."""
    world = LocalWorld(core(spec), size=1)
    (mean,) = world.step(normal(bucket_of((1000,)), 1))
    assert world.bytes_sent == 4 + 6 * np.count_nonzero(mean)
    assert 50 < np.count_nonzero(mean) < 400


@pytest.mark.parametrize("spec", SPECS)
def test_states_come_back_from_their_leaves(spec: str) -> None:
    method, ops = core(spec, feedback=core(spec).supports_feedback), ops_of("numpy")
    state = method.init(ops, BUCKET, World(0, 1))
    for step in range(2):
        (result,) = lockstep(ops, method, BUCKET, normal(BUCKET, 1, seed=step), [state])
        state = result.state
    again = unflatten(method.init(ops, BUCKET, World(0, 1)), flatten(state))
    assert type(again) is type(state)
    x = normal(BUCKET, 1, seed=9)
    (first,), (second,) = (lockstep(ops, method, BUCKET, [a.copy() for a in x], [s]) for s in (state, again))
    np.testing.assert_array_equal(first.total, second.total)


@pytest.mark.parametrize("spec", SPECS)
def test_leaves_are_what_their_annotations_say(spec: str) -> None:
    """So that they can be dealt out to other ranks and other buckets."""
    method, ops = core(spec, feedback=core(spec).supports_feedback), ops_of("numpy")
    state = method.init(ops, BUCKET, World(0, 3))
    alone = [leaves(method.init(ops, bucket_of(shape), World(0, 3))) for shape in BUCKET.shapes]
    for path, leaf in leaves(state).items():
        sizes = {
            Per.BUCKET: 1,
            Per.COORDINATE: BUCKET.numel,
            Per.GRADIENT: sum(one[path].size for one in alone),
            Per.PART: -(-leaves(method.init(ops, BUCKET, World(0, 1)))[path].size // 3),
            Per.WHOLE: leaf.size,
        }
        per = kinds(state)[path].per
        assert leaf.ndim == (per is not Per.BUCKET) and leaf.size == pytest.approx(sizes[per], rel=0.05), path


@on(ALL, SPECS)
def test_states_are_never_overwritten(spec: str, framework: str) -> None:
    """A step that is thrown away must leave the state that it started from."""
    ops, method = ops_of(framework), core(spec, feedback=core(spec).supports_feedback)
    state = method.init(ops, BUCKET, World(0, 1))
    (result,) = lockstep(ops, method, BUCKET, normal(BUCKET, 1), [state])
    state, before = result.state, {path: leaf.copy() for path, leaf in leaves(result.state).items()}
    lockstep(ops, method, BUCKET, normal(BUCKET, 1, seed=1), [state])
    for path, leaf in leaves(state).items():
        np.testing.assert_array_equal(leaf, before[path], err_msg=path)


@on(ALL, SPECS)
def test_constant_gradients(spec: str, framework: str) -> None:
    """All equal, all zero, denormal, huge: no division by zero and nothing out of range."""
    ops, method = ops_of(framework), core(spec)
    for value in (0.0, -0.0, 1.0, -3.0, 1e-42, 1e30):
        xs = [np.full(BUCKET.numel, value, np.float32)] * 2
        results = lockstep(ops, method, BUCKET, xs, [method.init(ops, BUCKET, World(0, len(xs))) for _ in xs])
        total = np.asarray(results[0].total)
        if spec == "fp16" and value == 1e30:
            assert np.isinf(total).all()  # as with Horovod's own fp16: visible to a loss scaler
        else:
            assert np.isfinite(total).all(), value
            most = 2.0001 * abs(np.float32(value)) * EXAMPLES[spec].gain + 1e-43
            assert method.scaleless or (np.abs(total) <= most).all(), value


def test_ef21_is_refused_where_the_total_is_no_sum() -> None:
    for options in ("", ",hierarchical=on"):
        with pytest.raises(SpecError, match=r"feedback=ef21 is not supported with sparseloco.*its total is no sum"):
            parse(f"sparseloco:feedback=ef21{options}")


def test_feedback_is_refused_where_nothing_is_kept() -> None:
    for spec in ("none", "randomk:unbiased=on", "qsgd:norm=l2", "signsgd", "loco", "homomorphic"):
        with pytest.raises(SpecError, match="feedback=on is not supported"):
            ErrorFeedback(core(spec))


@pytest.mark.parametrize("name", REGISTRY)
def test_every_method_has_an_example_of_its_own(name: str) -> None:
    assert any(spec.partition(":")[0] == name for spec in EXAMPLES)
    for spec in (*REGISTRY[name].card.lossless, *REGISTRY[name].card.compared):
        assert bare(spec).name == name
