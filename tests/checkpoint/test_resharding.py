"""States dealt out to other ranks: nothing that must not be lost is lost, and training goes on, equal on all ranks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from catalogue import COMPOSED, SPECS, one_in
from worlds import Arr, bucket_of, leaves, normal

from hvd_compress import parse
from hvd_compress.checkpoint.resharding import BucketSnapshot, Former, inherit, needed_by_others, redistribute
from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import State, World
from hvd_compress.core.method import Method
from hvd_compress.core.state_tree import Kind, Per, Role, flatten, kinds, unflatten
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.transport.lockstep import lockstep

OPS = NumpyOps()
BUCKET = bucket_of((30, 20), (7,), (9, 3))
ALL = [*SPECS, *COMPOSED]


def method_of(spec: str) -> Method:
    """What carries the first gradient of the bucket."""
    return (COMPOSED.get(spec) or parse(spec)).core


def run(method: Method, states: list[State], steps: range, bucket: Bucket = BUCKET) -> tuple[list[State], list[Arr]]:
    """A few steps; gives the states and what the ranks got in the last one."""
    for step in steps:
        results = lockstep(OPS, method, bucket, normal(bucket, len(states), seed=step), states)
        states, totals = [result.state for result in results], [np.asarray(result.total) for result in results]
    return states, totals


def started(method: Method, size: int, steps: int = 3) -> list[State]:
    return run(method, [method.init(OPS, BUCKET, World(0, size)) for _ in range(size)], range(steps))[0]


def formers(method: Method, states: list[State], heirs: list[int]) -> list[Former]:
    """What each rank of before gives to its heir and to all others."""
    found = []
    for rank, (state, heir) in enumerate(zip(states, heirs, strict=True)):
        if heir >= 0:
            found.append(Former(leaves(state), rank, heir))
    return found


def dealt_out(method: Method, states: list[State], size: int, heirs: list[int]) -> list[State]:
    """The states of ``size`` new ranks; a rank of before without an heir (-1) is lost."""
    dealt = []
    for rank in range(size):
        fresh = method.init(OPS, BUCKET, World(0, size))
        left = formers(method, states, heirs)
        new = redistribute(leaves(fresh), kinds(fresh), BUCKET.numel, left, len(states), World(rank, size))
        like = flatten(fresh)
        dealt.append(unflatten(fresh, {p: int(v) if isinstance(like[p], int) else v for p, v in new.items()}))
    return dealt


def summed(states: list[State], role: Role) -> dict[str, Arr]:
    """The sum over the ranks of all leaves of a role."""
    paths = [path for path, known in kinds(states[0]).items() if known.role is role]
    return {path: np.sum([leaves(state)[path] for state in states], axis=0) for path in paths}


@pytest.mark.parametrize("spec", one_in(3, ALL))
def test_roles_are_what_they_say(spec: str) -> None:
    """What is not declared otherwise is equal on all ranks; a total is the sum of what stands beside it."""
    method = method_of(spec)
    states = started(method, 3)
    known = kinds(states[0])
    assert known.keys() == leaves(states[0]).keys()
    for path, (role, *_) in known.items():
        here = [leaves(state)[path] for state in states]
        if role in (Role.SHARED, Role.TOTAL):
            assert all(np.array_equal(other, here[0]) for other in here), path
        if role is Role.TOTAL:
            own = np.sum([leaves(state)["local"] for state in states], axis=0)
            np.testing.assert_allclose(here[0], own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("spec", "size"), one_in(4, itertools.product(ALL, [1, 3, 8])))
def test_another_number_of_ranks_keeps_the_sums_and_goes_on(spec: str, size: int) -> None:
    method = method_of(spec)
    before = started(method, 4)
    after = dealt_out(method, before, size, [rank % size for rank in range(4)])
    for role in (Role.OWN, Role.TOTAL):
        for path, total in summed(before, role).items():
            factor = 1.0 if role is Role.OWN else size / 4
            np.testing.assert_allclose(summed(after, role)[path], total * factor, rtol=1e-5, atol=1e-5)
    for path, (role, *_) in kinds(before[0]).items():
        if role is Role.SERVED:
            old, new = (np.concatenate([leaves(s)[path] for s in states])[: BUCKET.numel] for states in (before, after))
            np.testing.assert_array_equal(old, new)
    states, totals = run(method, after, range(3, 6))
    if "delay" not in spec:
        assert all(np.array_equal(total, totals[0]) for total in totals)
    assert np.isfinite(totals[0]).all()
    assert {p: np.shape(v) for p, v in leaves(states[0]).items()} == {
        p: np.shape(v) for p, v in leaves(method.init(OPS, BUCKET, World(0, size))).items()
    }


@pytest.mark.parametrize("spec", one_in(3, ALL))
def test_a_lost_rank_takes_its_own_with_it_and_nothing_else(spec: str) -> None:
    """Of three ranks the first is lost, and two join: survivors keep what is theirs, newcomers start clean."""
    method = method_of(spec)
    before = started(method, 3)
    after = dealt_out(method, before, 4, [-1, 0, 2])
    for path, (role, *_) in kinds(before[0]).items():
        kept = [leaves(before[old])[path] for old in (1, 2)]
        now = [leaves(after[new])[path] for new in (0, 2, 1, 3)]
        if role in (Role.OWN, Role.PRIVATE):
            assert np.array_equal(kept[0], now[0]) and np.array_equal(kept[1], now[1]), path
            clean = leaves(method.init(OPS, BUCKET, World(0, 4)))[path]
            assert np.array_equal(now[2], clean) and np.array_equal(now[3], clean), path
        if role is Role.TOTAL:
            np.testing.assert_array_equal(now[0], sum(leaves(before[old])["local"] for old in (1, 2)))
    _, totals = run(method, after, range(3, 5))
    if "delay" not in spec:
        assert all(np.array_equal(total, totals[0]) for total in totals)


@pytest.mark.parametrize("spec", one_in(3, ALL))
def test_what_travels_is_enough(spec: str) -> None:
    """A rank that knows of the others only what `needed_by_others` names ends with the same state."""
    method = method_of(spec)
    before = started(method, 3)
    whole = [Former(leaves(state), rank, rank) for rank, state in enumerate(before)]
    fresh = method.init(OPS, BUCKET, World(0, 4))
    for rank in range(4):
        known = [
            f if f.heir == rank else f._replace(leaves=needed_by_others(f.leaves, kinds(fresh), first=f.rank == 0))
            for f in whole
        ]
        ends = [
            redistribute(leaves(fresh), kinds(fresh), BUCKET.numel, some, 3, World(rank, 4)) for some in (whole, known)
        ]
        assert all(np.array_equal(ends[0][path], ends[1][path]) for path in ends[0])


def test_the_part_of_a_rank_that_missed_a_change_is_left_out() -> None:
    """It was the third of three, where the others have been two since."""
    left = [Former({"served": np.array([5.0])}, 0, 0), Former({"served": np.array([7.0])}, 2, 1)]
    new = redistribute({"served": np.zeros(1)}, {"served": Kind(Role.SERVED, Per.PART)}, 1, left, 2, World(0, 2))
    np.testing.assert_array_equal(new["served"], [5.0])


def kept(
    method: Method, names: list[str], shapes: list[tuple[int, ...]], state: dict[str, Any] | None = None
) -> BucketSnapshot:
    bucket = bucket_of(*shapes)
    return BucketSnapshot(names, bucket, method, state or leaves(method.init(OPS, bucket, World(0, 2))))


def test_residuals_go_with_their_parameters() -> None:
    """Buckets are cut anew, in another order, with one parameter more and one less."""
    method = parse("topk:ratio=0.5,momentum=0.5").core
    old = [
        kept(method, ["a", "b"], [(2,), (3,)], {"velocity": np.arange(5.0), "residual": -np.arange(5.0)}),
        kept(method, ["c"], [(2,)], {"velocity": np.array([7.0, 8.0]), "residual": np.array([9.0, 10.0])}),
    ]
    new = inherit(kept(method, ["c", "new", "b"], [(2,), (1,), (3,)]), old)
    np.testing.assert_array_equal(new["velocity"], [7, 8, 0, 2, 3, 4])
    np.testing.assert_array_equal(new["residual"], [9, 10, 0, -2, -3, -4])


def test_counters_are_inherited_from_the_same_method_alone() -> None:
    randomk, int8 = parse("randomk").core, parse("int8").core
    old = kept(randomk, ["a"], [(40, 40)])
    old = old._replace(leaves={path: np.asarray(leaf) + 5 for path, leaf in old.leaves.items()})
    assert inherit(kept(randomk, ["a", "b"], [(40, 40), (3, 3)]), [old])["inner.step"] == 5
    assert inherit(kept(int8, ["a", "b"], [(40, 40), (3, 3)]), [old])["step"] == 0


def test_the_same_bucket_is_inherited_whole() -> None:
    method = parse("powersgd:rank=2").core
    old = kept(method, ["a"], [(40, 40)])
    old = old._replace(leaves={path: np.asarray(leaf) + 1 for path, leaf in old.leaves.items()})
    assert inherit(kept(method, ["a"], [(40, 40)]), [old]) == old.leaves


def test_a_renumbered_rank_serves_its_new_part_without_the_errors_of_its_old_one() -> None:
    """As many ranks as before, but the first is lost: parts are as long as they were, and others'."""
    method = parse("loco").core
    before = started(method, 3)
    after = dealt_out(method, before, 3, [-1, 0, 1])
    clean = leaves(method.init(OPS, BUCKET, World(0, 3)))
    for old, new in ((1, 0), (2, 1)):
        was, now = leaves(before[old]), leaves(after[new])
        assert np.array_equal(now["sent.data"], was["sent.data"])
        assert (
            np.array_equal(now["served.data"], clean["served.data"])
            and (was["served.data"] != now["served.data"]).any()
        )
