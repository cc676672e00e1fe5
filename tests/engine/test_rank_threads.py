"""The ranks themselves: what they exchange, in which order they go on, and how they end when they cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch
from engine.ranks import Job, enter, everyone, rank
from worlds import Arr

from hvd_compress.core.collectives import AllGather, AllReduce, AllToAll, Broadcast, Collective, ReduceScatter
from hvd_compress.errors import ExchangeError
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.ops.torch_devices import torch_ops
from hvd_compress.torch.bucket_exchange import BucketExchange
from hvd_compress.torch.step import Step
from hvd_compress.transport.lockstep import perform
from hvd_compress.transport.rank_threads import DeadlockError, Matching, RankGoneError, RankThreads, ThreadTransport

MATCHINGS = get_args(Matching)


def ranks_of(size: int, seed: int = 0, matching: Matching = "names", deadline: float = 5.0) -> RankThreads:
    return RankThreads(size, NumpyOps(), seed=seed, matching=matching, deadline=deadline)


def one(value: float = 1.0) -> AllReduce:
    return AllReduce(np.array([value], np.float32))


@pytest.mark.parametrize("matching", MATCHINGS)
def test_collectives_do_what_the_simulator_does(matching: Matching) -> None:
    rows = [np.arange(6, dtype=np.float32).reshape(3, 2) * (rank + 1) for rank in range(3)]
    makes: list[Callable[[Arr], Collective]] = [
        lambda a: AllReduce(a),
        lambda a: AllReduce(a, "max"),
        lambda a: ReduceScatter(a),
        lambda a: AllGather(a.astype(np.uint8).ravel()),
        lambda a: AllToAll(a.astype(np.uint8)),
        lambda a: Broadcast(a, 2),
    ]

    def program(transport: ThreadTransport) -> list[Arr]:
        handles = [transport.start(make(rows[transport.world.rank]), f"x{i}") for i, make in enumerate(makes)]
        return [handle.result() for handle in handles]

    for number, replies in enumerate(ranks_of(3, matching=matching).run(program)):
        for make, reply in zip(makes, replies, strict=True):
            np.testing.assert_array_equal(reply, perform([make(row) for row in rows], 3)[number])


def test_nodes_are_connected_first() -> None:
    def program(transport: ThreadTransport) -> list[float]:
        with pytest.raises(ExchangeError, match=r"before connect\(\)"):
            transport.start(one()._replace(scope="node"), "x")
        transport.connect()
        channels = transport.channels(["b0"])
        assert channels is not None
        return [
            float(channels["b0"].start(one(transport.world.rank)._replace(scope=scope), f"x.{scope}").result()[0])
            for scope in ("node", "across")
        ]

    for matching in ("names", "channels"):
        ranks = RankThreads(4, NumpyOps(), local_size=2, matching=matching)
        assert ranks.run(program) == [[1, 2], [1, 4], [5, 2], [5, 4]]


def test_channels_need_no_common_order_and_turns_do() -> None:
    """Each rank starts the buckets in another order."""

    def program(transport: ThreadTransport) -> list[float]:
        keys = ["a", "b"]
        channels = transport.channels(keys) or dict.fromkeys(keys, transport)
        order = keys if transport.world.rank else keys[::-1]
        handles = {key: channels[key].start(one(10 if key == "a" else 1), key) for key in order}
        return [float(handles[key].result()[0]) for key in keys]

    assert ranks_of(2, matching="names").run(program) == ranks_of(2, matching="channels").run(program) == [[20, 2]] * 2
    assert ranks_of(2, matching="turns").run(program) == [[11, 11]] * 2


def test_a_seed_is_an_order() -> None:
    """The same one gives the same order again, and among some there are several orders."""

    def order(seed: int) -> tuple[int, ...]:
        went: list[int] = []

        def program(transport: ThreadTransport) -> None:
            for step in range(5):
                transport.start(one(), f"x{step}").result()
                went.append(transport.world.rank)

        ranks_of(3, seed).run(program)
        return tuple(went)

    assert order(3) == order(3)
    assert len({order(seed) for seed in range(10)}) > 5


def test_the_ranks_may_change_between_steps() -> None:
    """The last of three leaves, and comes back; an elastic job does this."""

    def program(transport: ThreadTransport) -> list[float]:
        ranks, sums = transport.ranks, []
        for epoch, members in enumerate(([0, 1, 2], [0, 1], [0, 1, 2])):
            if transport.thread in members:
                before = transport.epoch
                ranks.restart(transport.thread, members, epoch)
                assert transport.epoch != before or epoch == 0
                transport = transport.renewed()
                sums.append(float(transport.start(one(), "x").result()[0]))
        return sums

    assert ranks_of(3).run(program) == [[3, 2, 3], [3, 2, 3], [3, 3]]


def test_ranks_that_wait_for_each_other_are_told_where() -> None:
    def program(transport: ThreadTransport) -> None:
        first, second = ("b0", "b1") if transport.world.rank else ("b1", "b0")
        transport.start(one(), first).result()
        transport.start(one(), second).result()

    with pytest.raises(DeadlockError) as error:
        ranks_of(2).run(program)
    for number, name in enumerate(("b1", "b0")):
        assert f"rank {number} waits for AllReduce {name!r} of (1,) float32 at {__file__}:" in str(error.value)
    assert str(error.value).count("in program") == 2


def test_ranks_that_look_and_never_see_are_told_where() -> None:
    """They poll, so one might still do something else: what tells is that none has gone on for a while."""

    def program(transport: ThreadTransport) -> None:
        handle = transport.start(one(), f"only.{transport.world.rank}")
        while not handle.done():
            pass

    with pytest.raises(DeadlockError, match=r"rank 0 waits for AllReduce 'only\.0'[^\n]*\n *rank 1 waits for"):
        ranks_of(2, deadline=0.2).run(program)


def test_who_waits_for_a_rank_that_has_ended_is_told() -> None:
    def program(transport: ThreadTransport) -> None:
        if transport.world.rank == 0:
            transport.start(one(), "x").result()

    with pytest.raises(RankGoneError, match=r"rank 0 waits for AllReduce 'x' .*, but rank 1 has ended"):
        ranks_of(2).run(program)


def test_the_first_error_is_the_one_that_is_raised() -> None:
    def program(transport: ThreadTransport) -> None:
        if transport.world.rank == 1:
            raise ArithmeticError("the cause")
        transport.start(one(), "x").result()

    for seed in range(5):
        with pytest.raises(ArithmeticError, match="the cause"):
            ranks_of(3, seed).run(program)


def test_different_collectives_of_one_name_and_names_in_use_are_refused() -> None:
    def other(transport: ThreadTransport) -> None:
        transport.start(one() if transport.world.rank else AllGather(np.zeros(1, np.uint8)), "x").result()

    def twice(transport: ThreadTransport) -> None:
        if transport.world.rank == 0:
            transport.start(one(), "x")
            transport.start(one(), "x")

    with pytest.raises(ExchangeError, match="all ranks must start the same collective"):
        ranks_of(2).run(other)
    with pytest.raises(ExchangeError, match="rank 0 has started 'x' again before all others have"):
        ranks_of(2).run(twice)


def train(seed: int, matching: Matching, size: int = 2, deadline: float = 5.0) -> None:
    """Some steps of the engine, with several buckets and rounds."""

    def program(transport: ThreadTransport) -> None:
        enter(transport)
        weights = Job("powersgd:rank=2,min_size=0").run(3).weights
        for other in everyone(weights):
            assert torch.equal(other, weights)

    RankThreads(size, torch_ops("cpu"), seed=seed, matching=matching, deadline=deadline).run(program)


def test_no_order_of_the_ranks_harms_the_engine() -> None:
    for seed in range(20):
        train(seed, MATCHINGS[seed % 3])


def test_a_dependence_on_the_order_of_ranks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: where only the order matches collectives, buckets go on as soon as their replies arrive."""
    monkeypatch.setattr(Step, "_take_turns", lambda self: None)
    found = None
    for seed in range(20):
        try:
            train(seed, "turns")
        except (AssertionError, ExchangeError, DeadlockError, RankGoneError) as error:
            found = error
            break
    assert found is not None


def test_a_deadlock_in_the_engine_is_told_with_the_positions_of_both_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: each rank waits for one bucket before it starts the next one, and not all begin with the same one."""
    start, completing = BucketExchange.start, threading.local()

    def complete(self: Step) -> None:
        completing.now = True
        for exchange in self.exchanges[:: 1 if rank() else -1]:
            exchange.start()
            while exchange.busy:
                exchange.wait()

    monkeypatch.setattr(BucketExchange, "start", lambda self: start(self) if hasattr(completing, "now") else None)
    monkeypatch.setattr(Step, "_complete", complete)
    with pytest.raises(DeadlockError) as error:
        train(0, "names")
    said = str(error.value)
    assert "rank 0 waits for" in said and "rank 1 waits for" in said and said.count("in complete") == 2
