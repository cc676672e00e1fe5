"""Bucket plans: every gradient in one bucket, in the order of backward, the same on all ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_compress import parse
from hvd_compress.bucket import Bucket
from hvd_compress.errors import SpecError
from hvd_compress.merging import Gradient, Merge, plan
from hvd_compress.methods.cast import Dense

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
    ],
)
def test_cuts(merge: Merge, expected: list[tuple[int, ...]]) -> None:
    assert members(merge) == expected


@pytest.mark.parametrize("merge", [0, -1, True, 1.5, "two", "bytes:", "bytes:0", "bytes:64TB", "auto", None])
def test_bad_merge(merge: object) -> None:
    with pytest.raises(SpecError, match="merge must be a number of buckets"):
        plan(MODEL, TOPK, merge)  # type: ignore[arg-type]


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
    st.one_of(st.integers(1, 40), st.just("layer"), st.integers(1, 10**6).map(lambda n: f"bytes:{n}")),
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
