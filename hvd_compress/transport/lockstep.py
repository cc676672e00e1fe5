"""Run several ranks in one process: their transport, and exchanges in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    Exchange,
    ReduceScatter,
    State,
    World,
)
from hvd_compress.core.method import Method
from hvd_compress.errors import ExchangeError
from hvd_compress.ops import Ops
from hvd_compress.ops.totals import dense
from hvd_compress.transport.lowering import LACKS
from hvd_compress.transport.protocol import InFlight, ignore

Arr = npt.NDArray[Any]


class LocalHandle(NamedTuple):
    """Handle of a collective that one rank has started.

    Attributes:
        replies: The replies so far, by rank.
        rank: The rank.
        ops: Primitives of the framework.
    """

    replies: dict[int, Arr]
    rank: int
    ops: Ops

    def done(self) -> bool:
        """Return whether every participating rank has started it."""
        return self.rank in self.replies

    def result(self) -> Any:
        """Return the reply, which must have arrived: all ranks share one thread."""
        return self.ops.constant(self.replies[self.rank])


class _Started(NamedTuple):
    """Collective that some ranks have started: their messages, and the replies once all ranks have."""

    messages: dict[int, Collective]
    replies: dict[int, Arr]


def worlds(size: int, local_size: int = 1) -> list[World]:
    """Return the world of each rank."""
    return [World(rank, size, local_size) for rank in range(size)]


class Switchboard:
    """Match the collectives that the ranks of a process start.

    Args:
        size: Number of ranks.
        local_size: Number of ranks on each node.
        ops: Primitives of the framework; collectives are computed in numpy.
    """

    def __init__(self, size: int, local_size: int, ops: Ops) -> None:
        self.worlds = worlds(size, local_size)
        self._ops = ops
        self._waiting: dict[tuple[str, range], _Started] = {}

    def start(self, world: World, message: Collective, name: str) -> LocalHandle:
        """Start a collective of one rank; the last rank to start it performs it.

        Raises:
            ExchangeError: If the ranks start different collectives, or one of them uses a name twice at a time.
        """
        ranks = world.ranks(message.scope)
        started = self._waiting.setdefault((name, ranks), _Started({}, {}))
        if world.rank in started.messages:
            raise ExchangeError(f"rank {world.rank} has started {name!r} again before all others have")
        started.messages[world.rank] = message._replace(array=np.asarray(message.array))
        if len(started.messages) == len(ranks):
            del self._waiting[name, ranks]
            replies = perform([started.messages[rank] for rank in ranks], len(ranks))
            started.replies.update(zip(ranks, replies, strict=True))
        return LocalHandle(started.replies, world.rank, self._ops)

    def lacking(self, handle: LocalHandle) -> set[int]:
        """Return the ranks that have not started the collective of a handle yet."""
        for (_, ranks), started in self._waiting.items():
            if started.replies is handle.replies:
                return set(ranks) - started.messages.keys()
        return set()

    def stuck(self) -> str:
        """Describe the mismatch that makes ranks wait forever."""
        return _mismatch(message for started in self._waiting.values() for message in started.messages.values())


class LocalTransport(NamedTuple):
    """The transport of one rank of a process.

    Attributes:
        board: Switchboard of all ranks.
        world: The rank.
        missing: Unsupported collectives; see `LACKS`.
        epoch: Constant.
    """

    board: Switchboard
    world: World
    missing: frozenset[type] = LACKS
    epoch: int = 0

    def start(self, message: Collective, name: str) -> LocalHandle:
        """Start a collective."""
        return self.board.start(self.world, message, name)


def lockstep(
    ops: Ops,
    method: Method,
    bucket: Bucket,
    xs: Sequence[Arr],
    states: Sequence[State],
    count: Callable[[Collective], None] = ignore,
    local_size: int = 1,
) -> list[Exchange]:
    """Run one exchange per rank, all in this process.

    Args:
        ops: Primitives of any framework; collectives are computed in numpy.
        method: The method.
        bucket: Shapes and dtype of the gradients.
        xs: One gradient per rank.
        states: One state per rank.
        count: Called with each message of rank 0.
        local_size: Number of ranks on each node.

    Returns:
        The result of each rank, with a dense total.

    Raises:
        ExchangeError: If the ranks start different collectives.
    """
    ends = [flight.ended for flight in run_lockstep_encoded(ops, method, bucket, xs, states, count, local_size)]
    return [end._replace(total=dense(ops, end.total)) for end in ends]


def run_lockstep_encoded(
    ops: Ops,
    method: Method,
    bucket: Bucket,
    xs: Sequence[Arr],
    states: Sequence[State],
    count: Callable[[Collective], None] = ignore,
    local_size: int = 1,
) -> list[InFlight]:
    """Run one exchange per rank without decoding the totals; see `lockstep`."""
    board = Switchboard(len(xs), local_size, ops)

    def noted(message: Collective) -> None:
        count(message._replace(array=np.asarray(message.array)))

    counters = [noted, *[ignore] * (len(xs) - 1)]
    flights = [
        InFlight(method, ops, bucket, ops.constant(x), state, LocalTransport(board, world), "", counter)
        for x, state, world, counter in zip(xs, states, board.worlds, counters, strict=True)
    ]
    while unfinished := [flight for flight in flights if flight.result is None]:
        ready = [flight for flight in unfinished if flight.ready()]
        if not ready:
            raise ExchangeError(board.stuck())
        for flight in ready:
            flight.go_on()
    return flights


def perform(messages: list[Collective], size: int) -> list[Any]:
    """Perform one collective for all ranks that take part.

    Args:
        messages: One message per rank.
        size: Number of ranks.

    Returns:
        One reply per rank; replies share no memory.

    Raises:
        ExchangeError: If the messages of the ranks differ in kind, shape or dtype.
    """
    first = messages[0]
    ragged = isinstance(first, AllGather) and first.ragged
    asked = {(type(m), m._replace(array=None), m.array.shape[ragged:], m.array.dtype.name) for m in messages}
    if len(messages) != size or len(asked) != 1:
        raise ExchangeError(_mismatch(messages))
    arrays = [message.array for message in messages]
    if isinstance(first, AllReduce | ReduceScatter):
        maximum = isinstance(first, AllReduce) and first.op == "max"
        combined = arrays[0].copy()
        for array in arrays[1:]:
            combined = np.maximum(combined, array) if maximum else combined + array
        return [combined[r if isinstance(first, ReduceScatter) else ...].copy() for r in range(size)]
    if isinstance(first, AllGather):
        return [np.concatenate(arrays) if ragged else np.stack(arrays) for _ in arrays]
    if isinstance(first, AllToAll):
        return [np.stack([array[rank] for array in arrays]) for rank in range(size)]
    assert isinstance(first, Broadcast)
    return [arrays[first.root].copy() for _ in arrays]


def _mismatch(messages: Iterable[Collective]) -> str:
    """Describe the difference between the messages of ranks."""
    asked = {f"{type(m).__name__} of {m.array.shape} {m.array.dtype} in scope {m.scope}" for m in messages}
    return f"all ranks must start the same collective, but they started {sorted(asked)}"
