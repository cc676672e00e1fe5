"""Bucket plans: every gradient in one bucket, in the order of backward, the same on all ranks."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress import parse
from hvd_compress.core import bucketing
from hvd_compress.core.bucket import Bucket
from hvd_compress.core.bucketing import Gradient, Merge, advise, merged_sizes, pin, plan, start
from hvd_compress.core.collectives import World
from hvd_compress.errors import SpecError
from hvd_compress.methods.cast import Dense
from hvd_compress.methods.wrappers.router import by_name, phases

MODEL = [Gradient(f"w{i}", (64, 64), "float32") for i in range(6)]
TOPK = parse("topk")


def members(merge: Merge, gradients: list[Gradient] = MODEL) -> list[tuple[int, ...]]:
    return [planned.members for planned in plan(gradients, TOPK, merge)]


@pytest.mark.parametrize(
    ("merge", "expected"),
    [
        (1, [(5, 4, 3, 2, 1, 0)]),
        (2, [(5, 4, 3), (2, 1, 0)]),
        (3, [(5, 4), (3, 2), (1, 0)]),
        (99, [(5,), (4,), (3,), (2,), (1,), (0,)]),
        ("layer", [(5,), (4,), (3,), (2,), (1,), (0,)]),
        ("bytes:32KB", [(5, 4), (3, 2), (1, 0)]),
        ("bytes:40000", [(5, 4), (3, 2), (1, 0)]),
        ("bytes:1", [(5,), (4,), (3,), (2,), (1,), (0,)]),
        ("bytes:1GB", [(5, 4, 3, 2, 1, 0)]),
        ("auto", [(5, 4, 3), (2, 1, 0)]),
        ("search", [(5, 4, 3), (2, 1, 0)]),
        ("at:1", [(5,), (4, 3, 2, 1, 0)]),
        ("at:2,5", [(5, 4), (3, 2, 1), (0,)]),
    ],
)
def test_cuts(merge: Merge, expected: list[tuple[int, ...]]) -> None:
    assert members(merge) == expected


BAD = [0, -1, True, 1.5, "two", "bytes:", "bytes:0", "bytes:64TB", "automatic", None]
BAD_POSITIONS = ["at:", "at:0", "at:0,3", "at:3,3", "at:3,2", "at:-1", "at:1.5", "at:1,", "at:a", "at 3"]


@pytest.mark.parametrize("merge", [*BAD, *BAD_POSITIONS])
def test_bad_merge(merge: object) -> None:
    with pytest.raises(SpecError, match=r"merge=.* is not allowed: merge must be a number of buckets .*'at:12,40'"):
        plan(MODEL, TOPK, merge)  # type: ignore[arg-type]


@pytest.mark.parametrize("merge", ["at:6", "at:2,17"])
def test_positions_beyond_the_last_gradient(merge: str) -> None:
    message = rf"merge='{merge}' is not allowed here: with 6 compressed gradients, positions must be in 1 \.\. 5"
    with pytest.raises(SpecError, match=message):
        plan(MODEL, TOPK, merge)


def test_dense_and_empty_gradients_have_no_position() -> None:
    """As they are cut by nothing; neither a partition nor its search sees them."""
    model = [MODEL[0], Gradient("bias", (64,), "float32"), Gradient("empty", (0, 9), "float32"), *MODEL[1:3]]
    assert members("at:1,2", model) == [(4,), (3,), (0,), (1,)]
    assert merged_sizes(model, TOPK) == [4 * 64 * 64] * 3
    with pytest.raises(SpecError, match="with 3 compressed gradients"):
        plan(model, TOPK, "at:3")


def test_positions_stand_for_times_of_backward() -> None:
    """Where precisions are kept apart, each has a bucket for each part of backward in which it has gradients."""
    model = [MODEL[0]._replace(dtype="float64" if double else "float32") for double in (0, 1, 0, 0, 1, 0, 0)]
    assert members("at:1,3", model) == [(6,), (5,), (3, 2, 0), (4,), (1,)]
    assert members("auto", model) == members("at:4", model)
    model = [one._replace(dtype="float64" if i > 2 else "float32") for i, one in enumerate(MODEL)]
    assert members("auto", model) == [(5, 4), (3,), (2, 1, 0)]


@pytest.mark.parametrize(
    ("sizes", "cuts"), [([], ()), ([9], ()), ([1, 1], (1,)), ([1, 1, 1, 9], (3,)), ([9, 1, 1], (1,)), ([2, 1, 2], (2,))]
)
def test_the_start_has_two_buckets_of_about_equal_bytes(sizes: list[int], cuts: tuple[int, ...]) -> None:
    assert start(sizes) == cuts


@pytest.mark.parametrize("merge", [1, "at:1", "at:2,3,5"])
def test_a_partition_can_be_pinned(merge: Merge) -> None:
    ends = [len(part) for part in members(merge)]
    assert pin(tuple(sum(ends[:i]) for i in range(1, len(ends)))) == merge


def test_dense_gradients_share_a_bucket() -> None:
    model = [Gradient("w", (64, 64), "float32"), Gradient("b", (64,), "float32")] * 3
    planned = plan([g._replace(name=f"{g.name}{i}") for i, g in enumerate(model)], TOPK, 2)
    dense = [p for p in planned if p.method == Dense()]
    assert [p.members for p in dense] == [(5, 3, 1)]
    assert sorted(i for p in planned for i in p.members) == list(range(6))


def test_precisions_and_devices_are_kept_apart() -> None:
    model = [
        MODEL[0],
        MODEL[1]._replace(dtype="float64"),
        MODEL[2]._replace(device="cuda:0"),
        MODEL[3],
    ]
    assert sorted(members(1, model)) == [(1,), (2,), (3, 0)]


def test_empty_gradients_travel_in_no_bucket() -> None:
    assert members(1, [MODEL[0], Gradient("empty", (0, 5), "float32"), MODEL[1]]) == [(2, 0)]


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=30),
    st.one_of(
        st.integers(1, 40), st.sampled_from(["layer", "auto"]), st.integers(1, 10**6).map(lambda n: f"bytes:{n}")
    ),
)
def test_any_model_is_covered_once(sizes: list[tuple[int, bool]], merge: Merge) -> None:
    model = [Gradient(f"w{i}", (size, 4), "float64" if double else "float32") for i, (size, double) in enumerate(sizes)]
    planned = plan(model, TOPK, merge)
    assert sorted(i for p in planned for i in p.members) == [i for i, g in enumerate(model) if 0 not in g.shape]
    assert len({p.bucket.key for p in planned}) == len(planned)
    for bucket, _, positions in planned:
        assert isinstance(bucket, Bucket) and bucket.numel > 0
        assert list(positions) == sorted(positions, reverse=True)  # backward comes to the last one first
        assert bucket.shapes == tuple(model[i].shape for i in positions)


LORA = [Gradient("a", (8, 768), "float32"), Gradient("b", (2304, 8), "float32")]


def test_who_compresses_little_is_told_why(caplog: pytest.LogCaptureFixture) -> None:
    """Once, and by rank 0."""
    for gradients, spec, world, expected in (
        (LORA, "powersgd:rank=8", World(0, 2), r"100% .* by powersgd:rank=8: 2 such as 'b' .*smaller rank or min_gain"),
        (LORA, "topk:min_size=9999", World(0, 2), ""),
        (LORA[:1], "topk:min_size=9999", World(0, 2), r"1 such as 'a' of shape \(8, 768\): .* min_size=9999"),
        ([Gradient("v", (5000,), "float32")], "int8", World(0, 2), "vectors need vectors=on"),
        (MODEL, "topk:hierarchical=on", World(0, 4, 4), "all 4 ranks are on one node"),
    ):
        caplog.clear()
        bucketing._warn.cache_clear()  # other tests may have caused the same warning
        for _ in range(2):
            advise(gradients, parse(spec), world._replace(rank=1))
            advise(gradients, parse(spec), world)
        assert len(caplog.messages) == bool(expected)
        if expected:
            assert re.search(expected, caplog.messages[0])


def test_a_pattern_without_a_match_is_named(caplog: pytest.LogCaptureFixture) -> None:
    bucketing._warn.cache_clear()
    advise(MODEL, by_name({"w*": parse("topk"), "embed*": parse("int8")}), World(0, 2))
    assert caplog.messages == [
        "no parameter matches the pattern 'embed*' of by_name; their names are 'w0', 'w1', 'w2', ..."
    ]


def test_what_is_not_meant_to_be_compressed_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    advise(LORA, parse("fp16"), World(0, 2))
    advise(LORA, by_name({"*": parse("none")}), World(0, 2))
    advise(LORA, phases({0: parse("powersgd:rank=9"), 9: parse("int8")}), World(0, 2))
    assert not caplog.messages
