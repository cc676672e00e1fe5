"""Sparse methods: each selects what its paper says, and what travels can be told apart again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from worlds import FRAMEWORKS, Arr, bucket_of, normal, ops_of

from hvd_compress import LocalWorld
from hvd_compress.core.collectives import AllReduce, World
from hvd_compress.errors import SpecError
from hvd_compress.methods.blockk import BlockK
from hvd_compress.methods.dgc import DGC
from hvd_compress.methods.gtopk import GTopK
from hvd_compress.methods.scalecom import ScaleCom
from hvd_compress.methods.threshold import Threshold
from hvd_compress.methods.topkc import TopKC
from hvd_compress.methods.wrappers.error_feedback import ErrorFeedback
from hvd_compress.transport.lockstep import lockstep

NUMPY = ops_of("numpy")


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("spec", ["topk:ratio=0.0001,feedback=off", "threshold:threshold=3.9,feedback=off"])
def test_indices_beyond_16_bits(spec: str, framework: str) -> None:
    """200,000 coordinates are 4 pages, some of which have nothing to send."""
    xs = normal(bucket_of((200_000,)), 2)
    for x in xs:
        x[2**16 : 2**17] = 0
    total = LocalWorld(spec, size=2, ops=ops_of(framework)).step(xs)[0] * 2
    expected = np.zeros_like(total)
    for x in xs:
        places = np.argsort(-np.abs(x), kind="stable")[:20] if "topk" in spec else np.abs(x) >= 3.9
        expected[places] += x[places]
    np.testing.assert_allclose(total, expected, rtol=1e-6)


def test_a_page_costs_4_bytes_and_an_index_2() -> None:
    world = LocalWorld("topk:ratio=0.01,values=fp16", size=1)
    world.step([np.ones(200_000, np.float32)])
    assert world.bytes_sent == 4 * 4 + 2000 * (2 + 2)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_threshold_sends_what_reaches_it(framework: str) -> None:
    xs = [np.array([0.5, -0.5, 0.49, 0, -3]), np.array([0, 0, 0.4, -0.0, 0.1])]
    world = LocalWorld("threshold:threshold=0.5,feedback=off", size=2, ops=ops_of(framework))
    np.testing.assert_array_equal(world.step(xs)[0] * 2, [0.5, -0.5, 0, 0, -3])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("scale", [1.0, 1e-12])
def test_dgc_sends_about_as_many_as_it_should(framework: str, scale: float) -> None:
    """Within 0.8 to 1.3 times k; where the sample misleads, exactly k."""
    method, ops, bucket = DGC(ratio=0.01), ops_of(framework), bucket_of((100_000,))
    state: Any = method.init(ops, bucket, World(0, 1))
    counts = set()
    for step in range(5):
        (x,) = normal(bucket, 1, seed=step)
        indices, state = method.select(ops, bucket, ops.constant(x * np.float32(scale)), state)
        chosen = np.asarray(indices)
        counts.add(chosen.size)
        assert 800 <= chosen.size <= 1300
        assert np.abs(x[chosen]).min() >= np.delete(np.abs(x), chosen).max()
    assert len(counts) > 1
    alike = np.zeros(100_000, np.float32)
    alike[::20] = 1  # no threshold tells 1000 of these 5000 from the others
    indices, _ = method.select(ops, bucket, ops.constant(alike), state)
    np.testing.assert_array_equal(np.asarray(indices), np.arange(0, 20_000, 20))


def top(x: Arr, k: int) -> Arr:
    kept = np.zeros_like(x)
    places = np.argsort(-np.abs(x), kind="stable")[:k]
    kept[places] = x[places]
    return kept


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_gtopk_takes_the_winners_of_the_tree(ranks: int, framework: str) -> None:
    """Against the tree written out; losers keep what they had sent."""
    ops, method, bucket = ops_of(framework), GTopK(ratio=0.05), bucket_of((400,), dtype="float64")
    xs = normal(bucket, ranks)
    level = chosen = [top(x, 20) for x in xs]
    while len(level) > 1:
        level = [top(np.sum(level[i : i + 2], axis=0), 20) for i in range(0, len(level), 2)]
    winners = level[0] != 0
    feedback = ErrorFeedback(method)
    results = lockstep(ops, feedback, bucket, xs, [feedback.init(ops, bucket, World(0, ranks)) for _ in xs])
    np.testing.assert_allclose(np.asarray(results[0].total), sum(chosen) * winners, atol=1e-12)
    for x, mine, result in zip(xs, chosen, results, strict=True):
        np.testing.assert_allclose(np.asarray(result.state.residual), x - mine * winners, atol=1e-12)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_scalecom_follows_a_leader(framework: str) -> None:
    ops, method, bucket = ops_of(framework), ScaleCom(ratio=0.05), bucket_of((400,), dtype="float64")
    states = [method.init(ops, bucket, World(0, 3)) for _ in range(3)]
    for step in range(4):
        xs = normal(bucket, 3, seed=step)
        results = lockstep(ops, method, bucket, xs, states)
        states = [result.state for result in results]
        leader = top(xs[step % 3], 20) != 0
        np.testing.assert_allclose(np.asarray(results[0].total), sum(xs) * leader, atol=1e-12)


@pytest.mark.slow
def test_blockk_draws_every_block_alike() -> None:
    method, bucket = BlockK(ratio=0.1), bucket_of((95,), dtype="float64")
    state, drawn = method.init(NUMPY, bucket, World(0, 1)), np.zeros(95)
    for _ in range(2000):
        (result,) = lockstep(NUMPY, method, bucket, [np.ones(95)], [state])
        state, drawn = result.state, drawn + result.total
        places = np.flatnonzero(result.total)
        assert places.size in (10, 5) or places.size == 95 % 10
        np.testing.assert_array_equal(np.diff(places), 1)
    k = 10
    blocks = -(-95 // k)
    assert np.abs(drawn / 2000 - 1 / blocks).max() < 5 * (1 / blocks / 2000) ** 0.5


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_topkc_takes_the_chunks_with_the_largest_norms(framework: str, scale: float) -> None:
    """Norms of all ranks together, at any scale of the gradients."""
    ops, method, bucket = ops_of(framework), TopKC(ratio=0.25, chunk=10, values="fp32"), bucket_of((200,))
    xs = [(x.reshape(20, 10) * np.arange(1, 21)[:, None] * scale).astype(np.float32).ravel() for x in normal(bucket, 3)]
    norms = sum(np.linalg.norm((x / scale).reshape(20, 10), axis=1) for x in xs)
    chosen = np.isin(np.arange(20), np.argsort(-norms)[:5]).repeat(10)
    total = lockstep(ops, method, bucket, xs, [()] * 3)[0].total
    np.testing.assert_allclose(np.asarray(total), sum(xs) * chosen, rtol=1e-5)


def test_shuffling_hurts_topkc_and_not_topk() -> None:
    """Large coordinates are neighbours; a shuffled gradient has no good chunks."""
    rng = np.random.default_rng(0)
    sizes = np.exp(2 * rng.standard_normal(500)).repeat(64)
    xs = [rng.standard_normal(32000) * sizes for _ in range(4)]
    order = rng.permutation(32000)

    def error(spec: str, gradients: list[Arr]) -> float:
        exact = sum(gradients) / 4
        mean = LocalWorld(spec, size=4).step(gradients)[0]
        return float(np.sum((mean - exact) ** 2) / np.sum(exact**2))

    shuffled = [x[order] for x in xs]
    assert error("topkc:ratio=0.1", shuffled) > 2 * error("topkc:ratio=0.1", xs)
    assert error("topk:ratio=0.1", shuffled) == pytest.approx(error("topk:ratio=0.1", xs))


def test_topkc_sends_no_indices() -> None:
    method, bucket = TopKC(ratio=0.1), bucket_of((6400,))
    exchanging = method.exchange(NUMPY, bucket, normal(bucket, 1)[0], (), World(0, 2))
    largest: Any = next(exchanging)
    norms: Any = exchanging.send(largest.array)
    values: Any = exchanging.send(norms.array)
    assert largest == AllReduce(largest.array, op="max") and largest.array.shape == (1,)
    assert norms.array.shape == (100,) and norms.array.dtype == np.float16
    assert values.array.shape == (640,) and values.array.dtype == np.float16


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        (Threshold, {"threshold": 0.0}, "threshold=0.0 is not allowed: threshold must be above 0"),
        (DGC, {"sample": 0.0}, "sample=0.0 is not allowed"),
        (DGC, {"ratio": 0.0}, "ratio=0.0 is not allowed"),
        (GTopK, {"values": "fp8"}, "values='fp8' is not allowed"),
        (BlockK, {"ratio": 2.0}, "ratio=2.0 is not allowed"),
        (ScaleCom, {"ratio": 0.0}, "ratio=0.0 is not allowed"),
        (TopKC, {"chunk": 0}, "chunk=0 is not allowed"),
        (TopKC, {"values": "bf16"}, "values='bf16' is not allowed"),
    ],
)
def test_bad_parameters(kind: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        kind(**params)
