"""CTK: the definition written out, its bytes, and what makes it differ from top-k."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import FRAMEWORKS, Arr, bucket_of, normal, ops_of

from hvd_compress import LocalWorld, parse
from hvd_compress.core.collectives import World
from hvd_compress.errors import SpecError
from hvd_compress.methods.ctk import CTK
from hvd_compress.ops.code import Record
from hvd_compress.ops.totals import dense
from hvd_compress.transport.lockstep import lockstep


def sent(x: Arr, method: CTK) -> Arr:
    """Return what one rank sends, chunk by chunk, by sorting."""
    found, size = np.zeros(x.size), min(x.size, method.chunk)
    for start in range(0, x.size, size):
        chunk = np.zeros(size)
        chunk[: x.size - start] = x[start : start + size]
        kept = max(1, round(method.ratio * size))
        chosen = sorted(range(size), key=lambda i: (-abs(chunk[i]), i))[:kept]
        magnitudes = np.abs(chunk[chosen])
        large = magnitudes > magnitudes.mean()
        for group in (large, ~large):
            for i in itertools.compress(chosen, group):
                if start + i < x.size:
                    found[start + i] = np.copysign(magnitudes[group].mean(), chunk[i])
    return found


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [1, 63, 128, 1000])
@pytest.mark.parametrize(("ratio", "chunk"), [(0.1, 64), (1.0, 16), (0.001, 64), (0.05, 2**20)])
def test_it_sends_signs_of_the_largest_and_two_means(
    ratio: float, chunk: int, n: int, dtype: str, framework: str
) -> None:
    method, ops, bucket = CTK(ratio=ratio, chunk=chunk), ops_of(framework), bucket_of((n,), dtype=dtype)
    xs = normal(bucket, 3)
    xs[0][: n // 2] = 0  # fewer nonzero coordinates than a chunk sends
    states = [method.init(ops, bucket, World(0, 3)) for _ in xs]
    results = lockstep(ops, method, bucket, [x.copy() for x in xs], states)
    expected = sum(sent(x, method) for x in xs)
    for result in results:
        np.testing.assert_allclose(np.asarray(dense(ops, result.total)), expected, rtol=0, atol=0.02)


def test_signs_and_places_are_exact_even_where_one_coordinate_is_huge() -> None:
    x = normal(bucket_of((1024,)), 1)[0]
    x[100] = -3.4e38
    method, ops, bucket = CTK(), ops_of("torch"), bucket_of((1024,))
    (result,) = lockstep(ops, method, bucket, [x.copy()], [method.init(ops, bucket, World(0, 1))])
    total = np.asarray(dense(ops, result.total))
    expected = sent(x.astype(np.float64), method)
    np.testing.assert_array_equal(np.sign(total), np.sign(expected))
    assert total[100] == pytest.approx(-3.4e38, rel=2**-7)
    assert np.count_nonzero(total) == 31


@settings(max_examples=200)
@given(st.integers(1, 5000), st.floats(0.001, 0.25))
def test_an_index_takes_no_more_bits_than_the_bound_of_elias(size: int, ratio: float) -> None:
    """At most ``2 + ceil(log2(size / kept))`` bits each, where the best of all codes needs about half a bit less."""
    record = Record.of(size, ratio)
    indices = record.bits - 2 * record.kept
    assert indices <= record.kept * (2 + math.ceil(math.log2(size / record.kept)))
    least = math.log2(math.comb(size, record.kept))
    assert least <= indices <= least + 0.75 * record.kept + math.log2(size) + 2


@pytest.mark.parametrize(("spec", "factor"), [("ctk", 105), ("ctk:ratio=0.01", 227), ("ctk:chunk=4096", 114)])
def test_how_many_times_fewer_bytes(spec: str, factor: int) -> None:
    world = LocalWorld(parse(spec), 2)
    gradients = normal(bucket_of((1024, 1024)), 2)
    world.step([x.reshape(1024, 1024) for x in gradients])
    assert int(4 * 2**20 / world.bytes_sent) == factor


def test_a_ratio_can_be_reached_in_stages() -> None:
    world = LocalWorld(parse("ctk:warmup=4,min_size=0,vectors=on"), 1)
    counts = []
    for step in range(5):
        (mean,) = world.step(normal(bucket_of((8192,)), 1, seed=step))
        counts.append(int(np.count_nonzero(mean)))
    assert counts == sorted(counts, reverse=True) and counts[-1] == 8 * 31


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"ratio": 0.0}, r"ratio=0.0 is not allowed: ratio must be in \(0, 1\]"),
        ({"ratio": 1.5}, r"ratio=1.5 is not allowed"),
        ({"chunk": 0}, r"chunk=0 is not allowed: chunk must be in 1 .. "),
    ],
)
def test_bad_parameters(params: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        CTK(**params)
