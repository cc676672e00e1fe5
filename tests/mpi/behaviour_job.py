"""One rank: what goes wrong on one rank is known to all, and a saved state goes on bit for bit."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from mpi.common import COMM, RANK, SIZE, assert_ranks_agree, assert_same, done, gradients, mine, refusal
from mpi4py import MPI

from hvd_compress import LocalWorld
from hvd_compress.mpi import Aggregator, Gossip, LocalSteps, Outer

LAST = SIZE - 1
SPECS = ["topk:ratio=0.05", "int8", "powersgd:rank=2", "randomk:ratio=0.1", "onebit", "topk:warmup=4,measure=on"]


def on_the_last(other: Any, usual: Any) -> Any:
    """Something else on the last rank."""
    return other if RANK == LAST else usual


def a_bad_step_is_seen_by_all_and_changes_nothing(spec: str) -> None:
    disturbed, calm = Aggregator(spec), Aggregator(spec)
    for step in range(4):
        grads = mine(gradients(step))
        if step in (0, 2):
            bad = {**grads, "w": on_the_last(np.full_like(grads["w"], [np.nan, np.inf][step // 2]), grads["w"])}
            assert all(np.isnan(mean).all() for mean in disturbed.step(bad).values())
        means = calm.step(grads)
        assert_same(disturbed.step(grads), means)
        assert_same(grads, mine(gradients(step)), "the input")
    assert disturbed.stats().steps == 4
    assert disturbed.stats().bytes_sent == calm.stats().bytes_sent + 2


def a_choice_by_step_times_is_refused() -> None:
    kind, message = refusal(lambda: Aggregator("auto"))
    assert kind == "UnsupportedError" and "auto is not supported by MPI alone" in message


def disagreement_is_told_in_the_same_words() -> None:
    grads = mine(gradients(0))
    turned = dict(reversed(grads.items()))
    cases: list[tuple[Callable[[], object], str]] = [
        (
            first_step(on_the_last("topk:ratio=0.02", "topk"), 2, grads),
            f"'topk', rank {LAST} has 'topk:ratio=0.02'",
        ),
        (first_step("int8", on_the_last("layer", 2), grads), f"the merge: rank 0 has 2, rank {LAST} has 'layer'"),
        (first_step("int8", 2, on_the_last(turned, grads)), "parameters: rank 0 has 'w'"),
        (first_step("int8", 2, on_the_last(grads["w"], {"": grads["w"]})), "the method"),
        (first_step(on_the_last("topk:decay=0.9", "topk"), 2, grads["w"]), "the method"),
    ]
    for call, words in cases:
        kind, message = refusal(call)
        assert kind == "DisagreementError" and words in message, (kind, message)
        assert len(set(COMM.allgather(message))) == 1


def first_step(spec: str, merge: Any, grads: Any) -> Callable[[], object]:
    aggregator = Aggregator(spec, merge=merge)
    return partial(aggregator.step, grads)


def a_rank_that_cannot_take_part_leaves_nobody_waiting() -> None:
    aggregator, calm = Aggregator("topk:ratio=0.05"), Aggregator("topk:ratio=0.05")
    grads = mine(gradients(0))
    for bad, words in [({"w": np.zeros((5, 5), int)}, "dtype int64"), ({"w": grads["w"][1:]}, "have changed")]:
        if words == "have changed":
            assert_same(aggregator.step(grads), calm.step(grads))
        kind, message = refusal(partial(aggregator.step, on_the_last(bad, grads)))
        assert kind == "GradientError" and on_the_last(words, "another rank") in message, (kind, message)
    assert_same(aggregator.step(grads), calm.step(grads))


def a_saved_state_goes_on_bit_for_bit(spec: str) -> None:
    whole, broken = Aggregator(spec), Aggregator(spec)
    for step in range(5):
        if step == 2:  # a new one, which makes its first step after loading
            broken = reborn(spec, broken)
        if step == 4:  # one that has made steps of its own
            other = Aggregator(spec)
            other.step(mine(gradients(99)))
            other.load_state_dict(broken.state_dict())
            broken = other
        assert_same(broken.step(mine(gradients(step))), whole.step(mine(gradients(step))), spec)
        assert_same(broken.residual(), whole.residual(), spec)


def reborn(spec: str, old: Aggregator) -> Aggregator:
    """A new one with the state of an old one, through files."""
    with shared_folder() as folder:
        old.save(folder)
        COMM.Barrier()
        new = Aggregator(spec)
        new.load(folder)
        new.save(f"{folder}/again")  # before the first step, nothing is lost
        COMM.Barrier()
        new = Aggregator(spec)
        new.load(f"{folder}/again")
    return new


@contextmanager
def shared_folder() -> Iterator[str]:
    """A folder of rank 0 that all ranks use, until the last of them is done."""
    with tempfile.TemporaryDirectory() as mine_alone:
        yield COMM.bcast(mine_alone)
        COMM.Barrier()


def ranks_that_go_on_from_different_saves_are_refused() -> None:
    """Before anything is exchanged, in the same words, and whether they have loaded before their first step or not."""
    grads = mine(gradients(0))
    first = Aggregator("topk:ratio=0.05")
    first.step(grads)
    early = first.state_dict()
    first.step(grads)
    for late in (False, True):
        for other in (early, {}):
            aggregator = Aggregator("topk:ratio=0.05")
            if late:
                aggregator.step(grads)
            if state := on_the_last(other, first.state_dict()):
                aggregator.load_state_dict(state)
            for _ in range(2):
                kind, message = refusal(partial(aggregator.step, grads))
                assert kind == "DisagreementError" and "on the restored state: rank 0 has" in message, (kind, message)
                assert len(set(COMM.allgather(message))) == 1
            aggregator.load_state_dict(first.state_dict())
            calm = Aggregator("topk:ratio=0.05")
            calm.load_state_dict(first.state_dict())
            assert_same(aggregator.step(grads), calm.step(grads))


def a_save_that_was_broken_off_is_skipped() -> None:
    """All ranks go on from the one before, and then save under a number of their own."""
    grads = mine(gradients(0))
    with shared_folder() as folder:
        killed = Aggregator("topk:ratio=0.05")
        killed.step(grads)
        killed.save(folder)
        sound = killed.state_dict()
        killed.step(grads)
        if RANK == LAST:
            killed.save(folder)
        COMM.Barrier()
        new, expected = Aggregator("topk:ratio=0.05"), Aggregator("topk:ratio=0.05")
        new.load(folder)
        expected.load_state_dict(sound)
        assert_same(new.step(grads), expected.step(grads))
        new.save(folder)
        COMM.Barrier()
        again = Aggregator("topk:ratio=0.05")
        again.load(folder)
        assert_same(again.step(grads), new.step(grads))


def a_state_that_does_not_fit_changes_nothing() -> None:
    aggregator = Aggregator("powersgd:rank=2")
    grads = mine(gradients(0))
    Aggregator("powersgd:rank=2").load_state_dict(aggregator.state_dict())
    aggregator.step(grads)
    saved, before = aggregator.state_dict(), repr(aggregator.state_dict())
    ((name, session),) = saved["sessions"].items()
    # The first bucket fits, the last one does not: neither is taken.
    *_, key = session["buckets"]
    broken = {path: np.zeros(3) for path in session["buckets"][key]}
    zeros = {path: np.zeros_like(leaf) for path, leaf in session["buckets"]["b0"].items()}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"format": "hvd_compress/1"}, "this version of hvd_compress reads 'hvd_compress/3' only"),
        ({"method": "int8"}, "this state belongs to 'int8'"),
        ({"sessions": {"other": session}}, "of a model with other gradients than ['w', 'h'"),
        ({"sessions": {name: {**session, "rank": SIZE, "size": SIZE + 1}}}, f"saved on rank {SIZE} of {SIZE + 1}"),
        ({"sessions": {name: {**session, "buckets": {}}}}, "the saved buckets are [], but the model has"),
        (
            {"sessions": {name: {**session, "buckets": {**session["buckets"], "b0": zeros, key: broken}}}},
            f"of bucket {key!r} does not match",
        ),
    ]
    for change, words in changes:
        kind, message = refusal(partial(aggregator.load_state_dict, {**saved, **change}))
        assert kind == "StateError" and words in message, (change, kind, message)
        assert repr(aggregator.state_dict()) == before

    fresh = Aggregator("powersgd:rank=2")  # finds out in its first step, and tells the others
    fresh.load_state_dict({**saved, "sessions": {on_the_last("other", name): session}})
    for _ in range(2):
        kind, message = refusal(lambda: fresh.step(grads))
        assert kind == on_the_last("StateError", "GradientError"), (kind, message)


def a_state_of_another_number_of_ranks_keeps_the_sum_of_residuals() -> None:
    """Saved by all; gone on with by rank 0 alone, and then by all again."""
    with tempfile.TemporaryDirectory() as mine_alone:
        folder = COMM.bcast(mine_alone)
        aggregator = Aggregator("topk:ratio=0.05")
        for step in range(3):
            aggregator.step(mine(gradients(step)))
        aggregator.save(folder)
        kept = COMM.allgather(aggregator.residual())
        COMM.Barrier()
        alone = COMM.Split(RANK, RANK)
        if RANK == 0:
            single = Aggregator("topk:ratio=0.05", comm=alone)
            single.load(folder)
            single.step({name: np.zeros_like(grad) for name, grad in mine(gradients(0)).items()})
            owed = {name: sum(residual[name] for residual in kept) for name in kept[0]}
            assert any(np.any(array) for array in owed.values())
            sent = {name: owed[name] - left for name, left in single.residual().items()}
            assert all(0 < np.count_nonzero(array) <= 0.06 * array.size for array in sent.values() if array.size)
            single.save(f"{folder}/single")
        COMM.Barrier()
        again = Aggregator("topk:ratio=0.05")
        again.load(f"{folder}/single")
        again.step({name: np.zeros_like(grad) for name, grad in mine(gradients(0)).items()})
        assert RANK == 0 or not any(np.any(array) for array in again.residual().values())
        COMM.Barrier()


def a_bare_array_is_compressed_as_a_whole() -> None:
    xs = [np.random.default_rng(rank).standard_normal((9, 5)) for rank in range(SIZE)]
    aggregator, world = Aggregator("topk:ratio=0.1"), LocalWorld("topk:ratio=0.1", SIZE)
    mean = aggregator.step(xs[RANK])
    assert np.count_nonzero(mean) <= 5 * SIZE
    np.testing.assert_array_equal(mean, world.step(xs)[RANK])
    assert_same(aggregator.residual(), world.residual(RANK))


def a_part_of_the_ranks_can_have_one_of_its_own() -> None:
    """Groups of unequal size, each with its own communicator; numbers of others in between do not disturb."""
    group = COMM.Split(RANK % 2, RANK)
    aggregator = Aggregator("topk:ratio=0.2", comm=group)
    ranks = range(RANK % 2, SIZE, 2)
    xs = [np.arange(40.0) * (rank + 1) for rank in ranks]
    wanted = LocalWorld("topk:ratio=0.2", len(ranks)).step(xs)[RANK // 2]
    np.testing.assert_array_equal(aggregator.step(xs[RANK // 2]), wanted)
    assert_ranks_agree({"again": Aggregator("none").step(np.ones(3) * RANK)})


def what_is_taken_from_mpi_is_given_back() -> None:
    taken: list[Any] = []
    given_back: list[Any] = []

    def take(comm: MPI.Comm, key: int, value: Any) -> Any:
        taken.append(value)
        return value

    def give_back(comm: MPI.Comm, key: int, value: Any) -> None:
        given_back.append(value)

    key = MPI.Comm.Create_keyval(take, give_back)
    comm, grads = COMM.Dup(), mine(gradients(0))
    comm.Set_attr(key, "a duplicate")
    for _ in range(3):
        with Aggregator("topk:ratio=0.05", comm) as aggregator:
            aggregator.step(grads)
    assert len(taken) == len(given_back) == 3
    kind, message = refusal(partial(aggregator.step, grads))
    assert kind == "ExchangeError" and "closed: make a new one" in message
    assert aggregator.residual() and aggregator.stats().steps == 1
    aggregator.close()
    assert len(given_back) == 3
    comm.Free()


def pickled_it_is_a_new_one() -> None:
    """Nothing is asked of other ranks by that: one of them alone may do it."""
    old = Aggregator("topk:ratio=0.05", merge="layer")
    old.step(mine(gradients(0)))
    new = pickle.loads(pickle.dumps(old))
    for _ in range(RANK):
        pickle.loads(pickle.dumps(old))
    assert repr(new) == repr(old) and not new.residual()
    fresh = Aggregator("topk:ratio=0.05", merge="layer")
    assert_same(new.step(mine(gradients(1))), fresh.step(mine(gradients(1))))


def local_steps_are_averaged() -> None:
    """As one process does with all ranks, with Nesterov's momentum outside; a save goes on bit for bit."""
    outer = Outer(lr=0.7, momentum=0.9, nesterov=True)

    def moves(step: int, rank: int) -> Any:
        return np.random.default_rng([step, rank]).standard_normal((6, 5))

    def run(local: LocalSteps, w: Any, steps: range) -> None:
        for step in steps:
            w -= moves(step, RANK)
            local.step()

    for spec in ("none", "topk:ratio=1.0,min_size=0"):
        w = np.full((6, 5), float(RANK))
        local = LocalSteps({"w": w}, every=3, compression=spec, outer=outer)
        run(local, w, range(7))
        anchor, momentum = np.zeros((6, 5)), np.zeros((6, 5))
        for begin in (0, 3):
            mean = np.mean([sum(moves(s, r) for s in range(begin, begin + 3)) for r in range(SIZE)], axis=0)
            momentum = 0.9 * momentum + mean
            anchor -= 0.7 * (mean + 0.9 * momentum)
        np.testing.assert_allclose(w, anchor - moves(6, RANK))
        with local.averaged():
            assert_ranks_agree({"w": w})
            np.testing.assert_allclose(w, anchor)
        with tempfile.TemporaryDirectory() as mine_alone:
            folder = COMM.bcast(mine_alone)
            local.save(folder)
            other = w.copy()
            again = LocalSteps({"w": other}, every=3, compression=spec, outer=outer)
            COMM.Barrier()
            again.load(folder)
            other[...] = w
            COMM.Barrier()
        run(local, w, range(7, 12))
        run(again, other, range(7, 12))
        assert_same({"w": other}, {"w": w})
        again.close()
        local.close()
    kind, message = refusal(lambda: LocalSteps({"w": w}, "streaming"))
    assert kind == "SpecError" and "fragments=8 is not supported by MPI alone" in message


def neighbours_approach_each_other() -> None:
    """By the weights of the graph, whatever is sent; the mean over the ranks is kept; a save goes on bit for bit."""

    def everyone(array: Any) -> Any:
        return np.stack(COMM.allgather(array))

    def spread(array: Any) -> float:
        return float(np.linalg.norm(everyone(array).std(0)))

    def make(spec: str, w: Any, b: Any) -> Gossip:
        return Gossip({"w": w, "b": b}, f"{spec}@exponential", step_size=0.5 if spec.startswith("topk") else 1.0)

    for spec in ("none", "powergossip:rank=2", "topk:ratio=0.2,min_size=0,vectors=on,feedback=ef21"):
        w, b = np.zeros((6, 5)), np.zeros(7)
        gossip = make(spec, w, b)
        gossip.step()  # before the first step of an optimizer
        rng = np.random.default_rng(RANK)
        w += rng.standard_normal(w.shape)
        b += rng.standard_normal(b.shape)
        begun = spread(w)
        for _ in range(20):
            before = everyone(w)
            gossip.step()
            np.testing.assert_allclose(everyone(w).mean(0), before.mean(0), atol=1e-12)
            if spec == "none":
                change = sum(
                    edge.weight * -edge.sign(RANK) * (before[edge.high] - before[edge.low])
                    for edge in gossip.edges
                    if RANK in edge[:2]
                )
                np.testing.assert_allclose(w, before[RANK] + change, atol=1e-12)
        assert spread(w) <= 0.2 * begun, spec
        with tempfile.TemporaryDirectory() as mine_alone:
            folder = COMM.bcast(mine_alone)
            gossip.save(folder)
            others = w.copy(), b.copy()
            again = make(spec, *others)
            COMM.Barrier()
            again.load(folder)
            others[0][...], others[1][...] = w, b
            COMM.Barrier()
        for one, first in ((gossip, w), (again, others[0])):
            for step in range(4):
                one.step()
                first -= np.random.default_rng([RANK, step]).standard_normal(first.shape)
        assert_same({"w": others[0], "b": others[1]}, {"w": w, "b": b}, spec)
        with gossip.averaged():
            assert_ranks_agree({"w": w})
        gossip.finish()
        assert_ranks_agree({"w": w, "b": b})
        assert gossip.stats().steps == 24 * sum(RANK in edge[:2] for edge in gossip.edges)
        gossip.close()
        again.close()
    kind, message = refusal(lambda: Gossip({"w": w}, [(0, 0)]))
    assert kind == "SpecError" and "itself" in message


if __name__ == "__main__":
    for spec in SPECS:
        a_bad_step_is_seen_by_all_and_changes_nothing(spec)
        a_saved_state_goes_on_bit_for_bit(spec)
    disagreement_is_told_in_the_same_words()
    a_rank_that_cannot_take_part_leaves_nobody_waiting()
    a_state_that_does_not_fit_changes_nothing()
    ranks_that_go_on_from_different_saves_are_refused()
    a_choice_by_step_times_is_refused()
    a_save_that_was_broken_off_is_skipped()
    a_state_of_another_number_of_ranks_keeps_the_sum_of_residuals()
    a_bare_array_is_compressed_as_a_whole()
    a_part_of_the_ranks_can_have_one_of_its_own()
    what_is_taken_from_mpi_is_given_back()
    pickled_it_is_a_new_one()
    local_steps_are_averaged()
    neighbours_approach_each_other()
    done()
