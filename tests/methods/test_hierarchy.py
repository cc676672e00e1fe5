"""Laws of methods between nodes with several ranks each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from catalogue import EXAMPLES, bare, one_in
from worlds import COMPILED, Arr, bucket_of, normal, ops_of

from hvd_compress import LocalWorld, parse
from hvd_compress.checkpoint.resharding import Former, redistribute
from hvd_compress.core.collectives import World
from hvd_compress.core.method import Method
from hvd_compress.core.state_tree import flatten, kinds, unflatten
from hvd_compress.errors import SpecError
from hvd_compress.methods import REGISTRY
from hvd_compress.methods.wrappers.error_feedback import ErrorFeedback
from hvd_compress.methods.wrappers.hierarchy import Hierarchical, cut, deal, join, split
from hvd_compress.ops import Ops
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.transport.lockstep import lockstep, worlds

NUMPY = NumpyOps()
SPECS = [spec for spec in EXAMPLES if not bare(spec).linear and spec != "none"]
WORLDS = [(4, 2), (6, 3), (8, 4), (4, 1), (4, 4)]
STEPS = 12
RETAINING = [spec for spec in SPECS if bare(spec).supports_feedback and EXAMPLES[spec].total in ("exact", "rounded")]
BUCKET = bucket_of((20, 30), (4, 3, 5, 5), (1,), (7,))


def in_turn(specs: list[str]) -> list[tuple[str, int, int]]:
    """Each spec in one world, each world with several specs."""
    return [(spec, *WORLDS[number % len(WORLDS)]) for number, spec in enumerate(specs)]


def options(spec: str, more: str = "hierarchical=on") -> str:
    return f"{spec}{',' if ':' in spec else ':'}{more}"


def steps(
    method: Method, size: int, local_size: int, count: int, bucket: Any = BUCKET, ops: Ops = NUMPY
) -> tuple[list[Any], Arr, Arr]:
    """The states after some steps, the sum of all totals, and that of all gradients."""
    states = [method.init(ops, bucket, world) for world in worlds(size, local_size)]
    got, true = np.zeros(bucket.numel), np.zeros(bucket.numel)
    for step in range(count):
        xs = normal(bucket, size, seed=step)
        true += np.sum(xs, axis=0, dtype=np.float64)
        results = lockstep(ops, method, bucket, xs, states, local_size=local_size)
        states = [result.state for result in results]
        for result in results:
            np.testing.assert_array_equal(result.total, results[0].total)
        got += np.asarray(results[0].total)
    return states, got, true


@pytest.mark.parametrize(("spec", "size", "local_size"), one_in(3, in_turn(SPECS)))
def test_all_ranks_get_the_same_bits(spec: str, size: int, local_size: int) -> None:
    states, got, _ = steps(Hierarchical(bare(spec)), size, local_size, 3)
    assert np.isfinite(got).all()
    assert len(states) == size


@pytest.mark.parametrize("spec", SPECS)
def test_parts_of_a_bucket_may_differ_in_kind(spec: str) -> None:
    """Half of it is dense, the other half mostly zero, so groups of ranks may take different branches."""
    bucket, method = bucket_of((40, 50)), Hierarchical(bare(spec))
    xs = normal(bucket, 4)
    for x in xs:
        x[1010:] = 0
    states = [method.init(NUMPY, bucket, world) for world in worlds(4, 2)]
    results = lockstep(NUMPY, method, bucket, xs, states, local_size=2)
    for result in results:
        np.testing.assert_array_equal(result.total, results[0].total)


@pytest.mark.parametrize(
    ("spec", "size", "local_size"),
    one_in(6, in_turn(RETAINING)),
)
def test_what_was_sent_and_what_is_kept_are_all_there_was(spec: str, size: int, local_size: int) -> None:
    states, got, true = steps(ErrorFeedback(Hierarchical(bare(spec))), size, local_size, STEPS)
    kept = np.sum([state.residual for state in states], axis=0)
    atol = STEPS * 8 * 2**-8 if EXAMPLES[spec].total == "rounded" else 1e-3
    np.testing.assert_allclose(got + kept, true, atol=atol)
    assert local_size == size or np.abs(kept).max() > 1e-6


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=2"])
def test_16_bits_within_a_node_lose_no_gradient(spec: str) -> None:
    """Error feedback keeps what rounding takes from gradients; only totals are rounded for good."""
    states, got, true = steps(ErrorFeedback(Hierarchical(bare(spec), "fp16")), 4, 2, 12)
    kept = np.sum([state.residual for state in states], axis=0)
    np.testing.assert_allclose(got + kept, true, atol=12 * 8 * 2**-11)
    _, again, _ = steps(ErrorFeedback(Hierarchical(bare(spec))), 4, 2, 12)
    assert np.abs(again - got).max() > 0


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=2", "qsgd"])
def test_8_bits_within_a_node_lose_nothing(spec: str, framework: str) -> None:
    """Totals are not rounded. PyTorch's operations reuse memory."""
    states, got, true = steps(ErrorFeedback(Hierarchical(bare(spec), "int8")), 4, 2, 4, ops=ops_of(framework))
    kept = np.sum([np.asarray(state.residual) for state in states], axis=0)
    np.testing.assert_allclose(got + kept, true, atol=1e-3)


@pytest.mark.parametrize(
    ("spec", "size", "local_size"), in_turn([spec for cls in REGISTRY.values() for spec in cls.card.lossless])
)
def test_lossless_methods_give_the_sum(spec: str, size: int, local_size: int) -> None:
    _, got, true = steps(Hierarchical(bare(spec)), size, local_size, 2)
    np.testing.assert_allclose(got, true, rtol=0, atol=1e-4)


@pytest.mark.parametrize("spec", one_in(4, SPECS))
def test_with_one_rank_per_node_it_is_the_flat_method(spec: str) -> None:
    flat, tall = (LocalWorld(options(spec, more), 4) for more in ("min_size=0", "min_size=0,hierarchical=on"))
    shapes = {"a": (40, 25), "b": (30, 20), "c": (7,)}
    for step in range(3):
        grads = {n: [x.reshape(shape) for x in normal(bucket_of(shape), 4, step)] for n, shape in shapes.items()}
        wanted, found = flat.step(grads), tall.step(grads)
        for name in shapes:
            np.testing.assert_array_equal(found[name], wanted[name])
    assert flat.bytes_sent == tall.bytes_sent


@pytest.mark.long
@pytest.mark.parametrize("spec", [spec for spec, example in EXAMPLES.items() if example.unbiased])
def test_unbiased_methods_stay_unbiased(spec: str) -> None:
    """The mean over 1000 draws is within 5 standard errors of the truth."""
    bucket, times = bucket_of((400,)), 500
    method, xs = Hierarchical(bare(spec)), [np.tile(x, 2) for x in normal(bucket_of((200,)), 4)]
    states = [method.init(NUMPY, bucket, world) for world in worlds(4, 2)]
    sums = np.zeros((2, 400))
    for _ in range(times):
        results = lockstep(NUMPY, method, bucket, [x.copy() for x in xs], states, local_size=2)
        states = [result.state for result in results]
        error = results[0].total.astype(np.float64) - np.sum(xs, axis=0, dtype=np.float64)
        sums += error, error**2
    mean, spread = sums[0] / times, np.sqrt(sums[1] / times)
    assert np.abs(mean / np.maximum(spread, 1e-6) * times**0.5).max() < 5


@pytest.mark.parametrize("framework", COMPILED)
@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=2", "qsgd:bits=4", "efsignsgd", "topkc:ratio=0.1"])
def test_frameworks_agree_with_numpy(spec: str, framework: str) -> None:
    totals = []
    for name in ("numpy", framework):
        ops, method = ops_of(name), ErrorFeedback(Hierarchical(bare(spec)))
        states = [method.init(ops, BUCKET, world) for world in worlds(4, 2)]
        for step in range(2):
            results = lockstep(ops, method, BUCKET, normal(BUCKET, 4, seed=step), states, local_size=2)
            states = [result.state for result in results]
        totals.append(np.asarray(results[0].total))
    np.testing.assert_allclose(totals[1], totals[0], rtol=1e-3, atol=1e-3)


def test_momentum_stops_where_the_node_sent() -> None:
    """Gradients of the first step only: what has been sent has no velocity left on any rank, so it comes but once."""
    world = LocalWorld("dgc:ratio=0.5,sample=1.0,momentum=0.9,min_size=0,vectors=on,hierarchical=on", 4, local_size=2)
    xs = [x * 10 for x in normal(bucket_of((64,)), 2)] * 2  # so both nodes send the same coordinates
    first = world.step(xs)[0]
    later = sum(world.step([np.zeros(64, np.float32)] * 4)[0] for _ in range(2))
    assert np.count_nonzero(first) == 32
    assert not later[first != 0].any() and np.count_nonzero(later) == 32


@pytest.mark.parametrize(("size", "local_size"), [(6, 3), (2, 1), (3, 3), (8, 4)])
@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=2", "qsgd:bits=4,feedback=on", "dgc:ratio=0.1"])
def test_other_nodes_keep_the_sum_of_residuals(spec: str, size: int, local_size: int) -> None:
    method = parse(options(spec)).core
    before, _, _ = steps(method, 4, 2, 3)
    after = []
    for world in worlds(size, local_size):
        fresh = method.init(NUMPY, BUCKET, world)
        formers = [Former(flatten(state), rank, rank % size) for rank, state in enumerate(before)]
        leaves = redistribute(flatten(fresh), kinds(fresh), BUCKET.numel, formers, 4, world)
        after.append(unflatten(fresh, leaves))
    for path in [path for path, kind in kinds(before[0]).items() if kind.residual]:
        sums = [np.sum([flatten(state)[path] for state in states], axis=0) for states in (before, after)]
        np.testing.assert_allclose(sums[1], sums[0], rtol=1e-5, atol=1e-6)
        assert np.abs(sums[0]).max() > 0.1
    results = lockstep(NUMPY, method, BUCKET, normal(BUCKET, size), after, local_size=local_size)
    assert np.isfinite(results[0].total).all()


@pytest.mark.parametrize(
    "shapes", [((7,),), ((20, 30), (1,)), ((3, 4), (50, 60), (5, 5, 5)), ((1,),), ((2, 500), (8, 8))]
)
@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("divide", [cut, deal])
def test_parts_hold_every_coordinate_once(divide: Any, parts: int, shapes: tuple[tuple[int, ...], ...]) -> None:
    found = divide(shapes, parts)
    x = np.arange(1.0, bucket_of(*shapes).numel + 1)
    rows = split(NUMPY, found, x)
    assert rows.shape == (parts, found.length)
    assert np.array_equal(np.sort(rows[rows != 0]), x)
    np.testing.assert_array_equal(join(NUMPY, found, rows), x)


def test_matrices_stay_whole_and_large_ones_are_cut_into_rows() -> None:
    pieces = deal(((8, 8), (8, 8), (64, 8)), 4).pieces
    shapes = sorted(piece.shape for part in pieces for piece in part)
    assert shapes == [(8, 8), (8, 8), (16, 8), (16, 8), (16, 8), (16, 8)]
    assert all(part for part in pieces)


@pytest.mark.parametrize(
    "spec", ["topk:ratio=0.1,hierarchical=on", "dgc:hierarchical=on,inside=fp16", "qsgd:hierarchical=on,every=5"]
)
def test_specs_are_written_as_they_are_read(spec: str) -> None:
    assert parse(str(parse(spec))) == parse(spec)
    assert "hierarchical=on" in str(parse(spec))


def test_inside_needs_hierarchical() -> None:
    with pytest.raises(SpecError, match="inside=fp16 has no effect without hierarchical=on"):
        parse("topk:inside=fp16")


def test_world_of_a_node_alone_is_exact() -> None:
    xs = normal(bucket_of((1000,)), 4)
    mean = LocalWorld("topk:ratio=0.01,hierarchical=on", 4, local_size=4).step(xs)[0]
    np.testing.assert_allclose(mean, np.mean(xs, axis=0), rtol=1e-5, atol=1e-6)
    assert World(0, 4, 4).nodes == 1
