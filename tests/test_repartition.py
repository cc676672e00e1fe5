"""Buckets cut anew while training: what was kept of each gradient goes with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from catalogue import COMPOSED, EXAMPLES, SPECS, WARMING_UP, one_in
from worlds import leaves, normal

from hvd_compress import parse
from hvd_compress.checkpoint.resharding import BucketSnapshot, divisible, inherit
from hvd_compress.checkpoint.state_dict import FORMAT, Saved, SavedSession, from_dict
from hvd_compress.core.bucketing import Gradient, Merge, Planned, plan
from hvd_compress.core.collectives import State, World
from hvd_compress.core.method import Method
from hvd_compress.core.state_tree import Role, filled, kinds
from hvd_compress.errors import StateError
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.transport.lockstep import lockstep

OPS = NumpyOps()
MODEL = [Gradient(f"w{i}", shape, "float32") for i, shape in enumerate([(48, 40), (64, 32), (8, 6, 5, 5), (40, 40)])]
ALL = [spec for spec in [*SPECS, *COMPOSED, *WARMING_UP] if spec not in ("none", "fp16", "bf16")]
INDIVISIBLE = {spec for spec, example in EXAMPLES.items() if example.total == "served"}
"""A server's part of a bucket belongs to no gradient, nor does the scale of a block that two of them share."""

States = list[list[State]]
"""Of each bucket, of each rank."""


def method_of(spec: str) -> Method:
    """What compresses matrices."""
    return (COMPOSED.get(spec) or parse(spec)).route("w", (64, 64))


def began(planned: list[Planned]) -> States:
    return [[p.method.init(OPS, p.bucket, World(0, 2)) for _ in range(2)] for p in planned]


def run(planned: list[Planned], states: States, steps: range) -> States:
    """Some steps of two ranks."""
    for step in steps:
        for number, p in enumerate(planned):
            grads = normal(p.bucket, 2, seed=100 * step + number)
            results = lockstep(OPS, p.method, p.bucket, grads, states[number])
            states[number] = [result.state for result in results]
            assert all(np.isfinite(np.asarray(result.total)).all() for result in results)
    return states


def kept(planned: list[Planned], states: States, rank: int) -> list[BucketSnapshot]:
    return [
        BucketSnapshot(p.members, p.bucket, p.method, leaves(s[rank])) for p, s in zip(planned, states, strict=True)
    ]


def changed(old: list[Planned], states: States, new: list[Planned]) -> States:
    """The states of other buckets."""
    fresh = began(new)
    for rank in range(2):
        formers = kept(old, states, rank)
        for number, one in enumerate(kept(new, fresh, rank)):
            fresh[number][rank] = filled(fresh[number][rank], inherit(one, formers))
    return fresh


@pytest.mark.parametrize("spec", one_in(3, ALL))
def test_there_and_back_again(spec: str) -> None:
    """Through three other partitions, all that was kept comes back to the bit."""
    method = method_of(spec)
    first = plan(MODEL, method, 2)
    before = run(first, began(first), range(3))
    assert all(map(divisible, kept(first, before, 0))) == (spec not in INDIVISIBLE)
    if spec in INDIVISIBLE:
        return
    partitions: list[Merge] = [1, "at:1,2", "layer", 2]
    old, states = first, before
    for merge in partitions:
        new = plan(MODEL, method, merge)
        old, states = new, changed(old, states, new)
    for there, back in zip(before, states, strict=True):
        for rank in range(2):
            for path, leaf in leaves(there[rank]).items():
                assert np.array_equal(leaves(back[rank])[path], leaf) or not leaf.shape, path
    run(first, states, range(3, 5))


@pytest.mark.parametrize("merge", [1, "at:1,2", "layer"])
@pytest.mark.parametrize("spec", ["topk:ratio=0.05,feedback=ef21", "dgc:ratio=0.05", "powersgd:rank=2", "phases"])
def test_pieces_are_those_of_their_gradients(spec: str, merge: Merge) -> None:
    """A gradient that had a bucket for itself has all that was kept in that bucket, wherever it is now."""
    method = method_of(spec)
    single = plan(MODEL, method, "layer")
    before = run(single, began(single), range(3))
    merged = plan(MODEL, method, merge)
    after = changed(single, before, merged)
    for p, ranks in zip(merged, after, strict=True):
        owners = [number for number, one in enumerate(single) if one.members[0] in p.members]
        for rank in range(2):
            for path, leaf in leaves(ranks[rank]).items():
                theirs = [leaves(before[number][rank])[path] for number in owners]
                assert np.array_equal(leaf, np.concatenate(theirs) if leaf.shape else theirs[0]), path


def test_ranks_still_agree_after_a_change() -> None:
    """Factors are equal on all ranks before, so they are after; nothing of a rank's own gets to another."""
    for spec in ("powersgd:rank=2", "acpsgd:rank=2"):
        first, second = (plan(MODEL, method_of(spec), merge) for merge in (2, "at:1"))
        states = changed(first, run(first, began(first), range(3)), second)
        for ranks in states:
            found = [leaves(state) for state in ranks]
            for path, kind in kinds(ranks[0]).items():
                assert np.array_equal(found[0][path], found[1][path]) == (kind.role is Role.SHARED), path


def saved(merge: object, search: object) -> dict[str, Any]:
    """A state as it is written, with this partition."""
    session = SavedSession(0, 1, 3, {})._asdict() | {"merge": merge, "search": search}
    return {"format": FORMAT, **Saved("topk", 0, 1, {})._asdict(), "sessions": {"m": session}}


@pytest.mark.parametrize(("merge", "search"), [(None, None), (1, None), ("at:2,5", [[0.5, 0.25], [1.0, 0.0]]), (3, [])])
def test_partitions_are_saved(merge: Merge | None, search: list[list[float]] | None) -> None:
    session = from_dict(saved(merge, search), np.asarray).sessions["m"]
    assert session.merge == merge
    assert session.search == (None if search is None else [tuple(timing) for timing in search])


@pytest.mark.parametrize(("merge", "search"), [("at:5,2", None), (0, None), ([1], None), (1, [["a"]]), (1, 7)])
def test_partitions_that_cannot_be_are_refused(merge: object, search: object) -> None:
    with pytest.raises(StateError, match="this state of a compressor is damaged"):
        from_dict(saved(merge, search), np.asarray)
