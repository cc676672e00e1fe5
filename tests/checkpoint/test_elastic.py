"""Membership: who stays, who joins, and what each of them goes on with. Real elastic jobs are tested elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from catalogue import COMPOSED, EACH_KIND, one_in
from worlds import Arr, bucket_of, leaves, normal

from hvd_compress import parse
from hvd_compress.checkpoint import agreement
from hvd_compress.checkpoint.elastic import Membership
from hvd_compress.checkpoint.resharding import BucketSnapshot
from hvd_compress.core.bucketing import Gradient
from hvd_compress.core.collectives import State, World
from hvd_compress.core.method import Method
from hvd_compress.core.state_tree import Role, flatten, kinds, unflatten
from hvd_compress.errors import DisagreementError
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.transport.lockstep import lockstep

OPS = NumpyOps()
BUCKET = bucket_of((30, 20), (7,))
GRADIENTS = [Gradient("w", (30, 20), "float32"), Gradient("b", (7,), "float32")]
LABEL = 7


class Worker:
    """A rank that may be lost, or may have come later than others."""

    def __init__(self, method: Method, size: int) -> None:
        self.method = method
        self.membership = Membership(LABEL)
        self.state: State = method.init(OPS, BUCKET, World(0, size))
        self.steps = 0
        self.regrouped = False

    def meet(self, world: World, gather: Callable[[bytes, str], bytes]) -> None:
        kept = lambda: {"b0": BucketSnapshot(["w", "b"], BUCKET, self.method, leaves(self.state))}  # noqa: E731
        facts = agreement.describe(self.method, 2, GRADIENTS, world)
        meeting = self.membership.meet(world, self.steps, gather, facts, kept)
        self.regrouped = meeting is not None and bool(meeting.leaves)
        if meeting is not None and meeting.leaves:
            self.steps = meeting.steps
            fresh = self.method.init(OPS, BUCKET, world)
            kinds = flatten(fresh)
            new = {p: int(v) if isinstance(kinds[p], int) else np.asarray(v) for p, v in meeting.leaves["b0"].items()}
            self.state = unflatten(fresh, new)


def together(workers: list[Worker]) -> list[BaseException]:
    """All meet at the beginning of a step, each in a thread; gives the errors."""
    barrier, posted = threading.Barrier(len(workers)), dict[str, dict[int, bytes]]()
    errors: list[BaseException] = []

    def run(rank: int, worker: Worker) -> None:
        def gather(data: bytes, name: str) -> bytes:
            posted.setdefault(name, {})[rank] = data
            barrier.wait(20)
            joined = b"".join(posted[name][i] for i in range(len(workers)))
            barrier.wait(20)
            return joined

        try:
            worker.meet(World(rank, len(workers)), gather)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank, worker)) for rank, worker in enumerate(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def step(workers: list[Worker], number: int) -> list[Arr]:
    """A step of all; gives what each gets."""
    assert not together(workers)
    xs = normal(BUCKET, len(workers), seed=number)
    results = lockstep(OPS, workers[0].method, BUCKET, xs, [worker.state for worker in workers])
    for worker, result in zip(workers, results, strict=True):
        worker.state = result.state
        worker.steps += 1
    return [np.asarray(result.total) for result in results]


def method_of(spec: str) -> Method:
    return (COMPOSED.get(spec) or parse(spec)).core


@pytest.mark.parametrize("spec", one_in(3, [*EACH_KIND, "randomk:ratio=0.05", "topk:feedback=ef21", "int8", "phases"]))
def test_one_is_lost_one_joins(spec: str) -> None:
    """Survivors may get other numbers; what they have kept is theirs."""
    method = method_of(spec)
    workers = [Worker(method, 3) for _ in range(3)]
    for number in range(4):
        step(workers, number)
        assert not any(worker.regrouped for worker in workers)
    survivors = workers[1:]
    own = [path for path, kind in kinds(survivors[0].state).items() if kind.role is Role.OWN]
    before = [{path: leaves(worker.state)[path] for path in own} for worker in survivors]
    workers = [survivors[1], Worker(method, 3), survivors[0]]
    assert not together(workers)
    assert all(worker.regrouped for worker in workers)
    for worker, kept in zip(survivors, before, strict=True):
        for path in own:
            np.testing.assert_array_equal(leaves(worker.state)[path], kept[path])
    assert not any(np.any(leaves(workers[1].state)[path]) for path in own)
    for number in range(4, 7):
        totals = step(workers, number)
        assert all(np.array_equal(total, totals[0]) for total in totals)
        assert not any(worker.regrouped for worker in workers)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_number_of_ranks_changes(size: int) -> None:
    method = method_of("efsignsgd:twoway=on")
    workers = [Worker(method, 3) for _ in range(3)]
    step(workers, 0)
    workers = [*workers, *(Worker(method, size) for _ in range(size - 3))][:size]
    totals = step(workers, 1)
    assert all(np.array_equal(total, totals[0]) for total in totals)


def test_a_step_that_one_rank_broke_off() -> None:
    """The others may have taken over the new state: what must be equal is made equal."""
    method = method_of("randomk:ratio=0.05")
    workers = [Worker(method, 3) for _ in range(3)]
    step(workers, 0)
    behind = workers[2].state
    step(workers, 1)
    workers[2].state, workers[2].steps = behind, 1
    totals = step(workers, 2)
    assert all(np.array_equal(total, totals[0]) for total in totals)
    step(workers, 3)
    assert not any(worker.regrouped for worker in workers)
    assert [worker.steps for worker in workers] == [4, 4, 4]


def test_a_rank_that_missed_a_meeting_follows_those_who_did_not() -> None:
    method = method_of("randomk:ratio=0.05")
    workers = [Worker(method, 3) for _ in range(3)]
    step(workers, 0)
    step(workers[1:], 1)
    step(workers[1:], 2)
    assert not together(workers)
    assert [leaves(worker.state)["inner.step"] for worker in workers] == [3, 3, 3]


@pytest.mark.parametrize("other", ["topk:ratio=0.5", "int8"])
def test_a_newcomer_that_is_set_up_differently(other: str) -> None:
    workers = [Worker(method_of("topk"), 2) for _ in range(2)]
    step(workers, 0)
    errors = together([workers[0], Worker(method_of(other), 2)])
    assert len(errors) == 2 and len({str(error) for error in errors}) == 1
    assert all(isinstance(error, DisagreementError) for error in errors)
