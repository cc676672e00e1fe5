"""Saved states: each rank gets back what was its own, or its share of what other ranks had."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from catalogue import SPECS, one_in
from hypothesis import given
from hypothesis import strategies as st
from worlds import bucket_of, normal

from hvd_compress import parse
from hvd_compress.checkpoint.resharding import BucketSnapshot
from hvd_compress.checkpoint.saves import flaw
from hvd_compress.checkpoint.state_dict import (
    PendingStates,
    Saved,
    SavedSession,
    fingerprint,
    from_dict,
    restored,
    to_dict,
)
from hvd_compress.core.bucketing import Gradient
from hvd_compress.core.collectives import World
from hvd_compress.core.state_tree import Role, flatten, kinds
from hvd_compress.errors import StateError
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.transport.lockstep import lockstep

METHOD = parse("onebit:twoway=on").core
BUCKET = bucket_of((40, 30), (7,))


def trained(rank: int, size: int, steps: int = 3) -> Saved:
    """As after some steps: a residual of rank + 1, and as much owed as a server."""
    leaves = {path: np.asarray(leaf) for path, leaf in flatten(METHOD.init(NumpyOps(), BUCKET, World(0, size))).items()}
    leaves |= {path: leaf + rank + 1 for path, leaf in leaves.items() if path != "inner.step"}
    return Saved("onebit", rank, size, {"m": SavedSession(rank, size, steps, {"b0": leaves})})


def new(size: int) -> dict[str, BucketSnapshot]:
    return {"b0": BucketSnapshot(["w", "b"], BUCKET, METHOD, flatten(METHOD.init(NumpyOps(), BUCKET, World(0, size))))}


@pytest.mark.parametrize("size", [2, 8])
def test_states_of_four_ranks_are_dealt_out(size: int) -> None:
    four = [trained(rank, 4) for rank in range(4)]
    after = [restored(four, "m", new(size), World(rank, size)) for rank in range(size)]
    assert [(s.rank, s.size, s.steps) for s in after] == [(rank, size, 3) for rank in range(size)]
    residuals = [s.buckets["b0"]["residual"] for s in after]
    assert [float(r[0]) for r in residuals] == ([4.0, 6.0] if size == 2 else [1.0, 2.0, 3.0, 4.0, 0, 0, 0, 0])
    served = np.concatenate([s.buckets["b0"]["inner.served"] for s in after])[: BUCKET.numel]
    np.testing.assert_array_equal(served, np.repeat([1, 2, 3, 4], 302)[: BUCKET.numel])


def test_as_many_ranks_get_back_what_they_had() -> None:
    saved = trained(1, 4)
    back = restored([saved], "m", new(4), World(1, 4))
    assert back == saved.sessions["m"]


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ([trained(0, 2), trained(1, 2, steps=4)], r"are of different saves \(step 3 of job 0, step 4 of job 0\)"),
        ([trained(0, 2), trained(1, 2)._replace(sessions={})], "saved on rank 0 of 2 and cannot be restored"),
        ([trained(1, 2)], "saved on rank 1 of 2 and cannot be restored on rank 0 of 4"),
        ([trained(0, 3), trained(1, 3)], "saved on rank 0 of 3 and cannot be restored on rank 0 of 4"),
    ],
)
def test_what_does_not_belong_together_is_refused(saved: list[Saved], message: str) -> None:
    with pytest.raises(StateError, match=message):
        restored(saved, "m", new(4), World(0, 4))


def test_what_does_not_fit_the_model_is_refused() -> None:
    good = trained(0, 1)
    fresh = new(1)
    with pytest.raises(StateError, match="resume with the model and merge= that were saved"):
        restored([good], "m", {**fresh, "b1": fresh["b0"]}, World(0, 1))
    leaves = good.sessions["m"].buckets["b0"]
    for path, wrong in [
        ("residual", np.zeros(3, np.float32)),
        ("residual", np.zeros(BUCKET.numel)),
        ("inner.step", 0.5),
    ]:
        bad = good.sessions["m"]._replace(buckets={"b0": {**leaves, path: wrong}})
        with pytest.raises(StateError, match=f"'{path}' of bucket 'b0' does not match: expected shape"):
            restored([good._replace(sessions={"m": bad})], "m", fresh, World(0, 1))


def test_as_dicts_and_back() -> None:
    saved = trained(1, 4)
    back = from_dict(to_dict(saved, lambda leaf: leaf.tolist()), np.asarray)
    assert back._replace(sessions={}) == saved._replace(sessions={})
    for path, leaf in saved.sessions["m"].buckets["b0"].items():
        np.testing.assert_array_equal(back.sessions["m"].buckets["b0"][path], leaf)


@pytest.mark.parametrize("gone", ["method", "rank", "sessions", "format"])
def test_dicts_that_lack_something(gone: str) -> None:
    state: dict[str, Any] = to_dict(trained(1, 4), lambda leaf: leaf)
    del state[gone]
    with pytest.raises(StateError, match=r"not a compressor's state|is damaged"):
        from_dict(state, lambda leaf: leaf)


def test_what_was_loaded_waits_for_its_session() -> None:
    loaded = PendingStates()
    assert loaded.find("m", new(4), World(1, 4)) is None
    with pytest.raises(StateError, match="'onebit', but the compressor is 'topk': resume with the method 'onebit'"):
        loaded.put([trained(1, 4)], "topk")
    with pytest.raises(StateError, match=r"'topk', but the compressor is 'topk:ratio=0\.5': resume with"):
        loaded.put([trained(1, 4)._replace(method="topk")], "topk:ratio=0.5")
    loaded.put([trained(1, 4)], "onebit")
    assert list(loaded.join("onebit", World(1, 4), {}).sessions) == ["m"]
    assert loaded.find("other", new(4), World(1, 4)) is None
    session = loaded.find("m", new(4), World(1, 4))
    assert session is not None and session.steps == 3
    loaded.forget("m")
    assert loaded.join("onebit", World(1, 4), {}) == Saved("onebit", 1, 4, {})


def test_what_waits_for_other_ranks_is_carried_on() -> None:
    loaded = PendingStates()
    loaded.put([trained(0, 2), trained(1, 2)], "onebit")
    alone = loaded.join("onebit", World(0, 1), {})
    assert (alone.sessions, [part.rank for part in alone.carried]) == ({}, [0, 1])
    assert [part.rank for part in loaded.join("onebit", World(1, 3), {}).carried] == [1]
    assert loaded.join("onebit", World(1, 3), {"m": trained(1, 3).sessions["m"]}).carried == ()
    again = PendingStates()
    again.put([from_dict(to_dict(alone, lambda leaf: leaf), np.asarray)], "onebit")
    for rank in range(2):
        back = again.find("m", new(2), World(rank, 2))
        assert back is not None and (back.rank, back.size) == (rank, 2)
        residual = trained(rank, 2).sessions["m"].buckets["b0"]["residual"]
        np.testing.assert_array_equal(back.buckets["b0"]["residual"], residual)


@pytest.mark.parametrize("spec", one_in(3, [*SPECS, "topk:measure=on"]))
def test_ranks_can_tell_from_a_checksum_that_they_have_drifted_apart(spec: str) -> None:
    """It is of what is equal on all ranks: no more, which would refuse sound states, and no less."""
    method = parse(spec).core
    states = [method.init(NumpyOps(), BUCKET, World(0, 3)) for _ in range(3)]
    for step in range(4):
        xs = normal(BUCKET, 3, seed=step)
        states = [end.state for end in lockstep(NumpyOps(), method, BUCKET, xs, states)]
    known = kinds(states[0])
    sums = {fingerprint({"b0": flatten(state)}, {"b0": known}) for state in states}
    assert len(sums) == 1
    leaves = flatten(states[0])
    for path, kind in known.items():
        if kind.role is Role.SHARED:
            changed = {**leaves, path: np.asarray(leaves[path]) + 1}
            assert fingerprint({"b0": changed}, {"b0": known}) not in sums


def places(part: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in nested dicts and lists, without those in arrays."""
    if not isinstance(part, dict | list) or len(part) > 20:
        return [path]
    inner = part.items() if isinstance(part, dict) else enumerate(part)
    return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


ODD: list[Any] = [math.inf, -math.inf, math.nan, 1e300, -1, 2**70, 0.5, None, True, "", "x", [], {}, [1], {"a": 1}]


@given(data=st.data())
def test_a_state_with_odd_values_is_refused_or_means_what_it_says(data: st.DataObject) -> None:
    """By no other error than a `StateError`: until a model has its residual."""
    saved = trained(1, 4)
    gradients = [Gradient("w", (40, 30), "float32"), Gradient("b", (7,), "float32")]
    session = saved.sessions["m"]._replace(
        merge="at:1", search=[(0.5, 0.25)], came=[2, 2], gradients=gradients, process_set=[0, 1, 2, 3]
    )
    state: Any = to_dict(saved._replace(sessions={"m": session}, carried=[trained(0, 2)]), lambda leaf: leaf)
    state = json.loads(json.dumps(state, default=np.ndarray.tolist))
    *path, last = data.draw(st.sampled_from([place for place in places(state) if place]))
    target = state
    for key in path:
        target = target[key]
    target[last] = data.draw(st.sampled_from(ODD))
    try:
        back = from_dict(
            state, lambda leaf: np.asarray(leaf, np.float32) if isinstance(leaf, list) and len(leaf) > 20 else leaf
        )
        loaded = PendingStates()
        loaded.put([back], "onebit")
        loaded.find("m", new(4), World(1, 4))
        flaw([back], back.size)
    except StateError:
        return


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_residual_that_is_not_finite_is_refused(value: float) -> None:
    saved = trained(0, 1)
    for path in ("residual", "inner.served"):
        leaves = dict(saved.sessions["m"].buckets["b0"])
        leaves[path] = np.where(np.arange(leaves[path].size) == 3, value, leaves[path]).astype(np.float32)
        bad = saved._replace(sessions={"m": saved.sessions["m"]._replace(buckets={"b0": leaves})})
        with pytest.raises(StateError, match=f"'{path}' of bucket 'b0' has 1 of 1207 numbers that are not finite"):
            restored([bad], "m", new(1), World(0, 1))
