"""The messages between a method and the transport that performs its collectives.

A method never communicates. Its ``exchange`` is a generator: it yields the collective that it needs and is resumed
with the result. So each method is written once and runs over every transport (`hvd_compress.core.transport`), which
only has to know these messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

Array: TypeAlias = Any
"""An array of the framework at work: ``numpy.ndarray``, ``torch.Tensor`` or ``tf.Tensor``."""

State: TypeAlias = Any
"""State of a method between steps: nested NamedTuples of arrays and ints; ``()`` for a stateless method."""


Scope: TypeAlias = Literal["world", "node", "across"]
"""The ranks of a collective: all, those on the same node, or those of equal local rank on all nodes."""


class World(NamedTuple):
    """The ranks that take part in an exchange, and how they lie on nodes.

    Attributes:
        rank: This process, ``0 <= rank < size``.
        size: Number of processes.
        local_size: Number of processes on each node. Ranks are numbered node by node.
    """

    rank: int
    size: int
    local_size: int = 1

    @property
    def local_rank(self) -> int:
        """This process among those of its node."""
        return self.rank % self.local_size

    @property
    def node(self) -> int:
        """The node of this process."""
        return self.rank // self.local_size

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.size // self.local_size

    def within(self, scope: Scope) -> World:
        """Return the world of this process in a scope."""
        if scope == "world":
            return self
        return World(self.local_rank, self.local_size) if scope == "node" else World(self.node, self.nodes)

    def ranks(self, scope: Scope) -> range:
        """Return the ranks in the scope of this process, in order."""
        if scope == "world":
            return range(self.size)
        if scope == "across":
            return range(self.local_rank, self.size, self.local_size)
        return range(self.node * self.local_size, (self.node + 1) * self.local_size)

    def leaves_node(self, scope: Scope) -> bool:
        """Return whether a collective of this scope crosses the network between nodes."""
        return scope != "node" and self.nodes > 1


class AllReduce(NamedTuple):
    """Combine equally shaped arrays element by element; every rank gets the same result.

    Attributes:
        array: float16, float32, float64, int32 or int64, the same shape and dtype on all ranks.
        op: ``"sum"`` or ``"max"``.
        donate: The transport may overwrite ``array`` with the result.
        scope: The ranks that take part.
    """

    array: Array
    op: Literal["sum", "max"] = "sum"
    donate: bool = False
    scope: Scope = "world"


class ReduceScatter(NamedTuple):
    """Sum arrays element by element and give each rank one row: the reply is row ``rank`` of the sum.

    Attributes:
        array: float32 or float64, shape ``(size, n)``, the same on all ranks.
        scope: The ranks that take part; ``size`` and ``rank`` are those within it.
    """

    array: Array
    scope: Scope = "world"


class AllGather(NamedTuple):
    """Give every rank the arrays of all: the reply has shape ``(size, n)``, row ``r`` from rank ``r``.

    Attributes:
        array: uint8, shape ``(n,)``. Other dtypes travel as bytes (``ops.to_bytes``).
        ragged: Each rank has an ``n`` of its own, and the reply is one-dimensional: the arrays one after another. Where
            one ends it must say itself.
        scope: The ranks that take part; ``size`` and ``r`` are those within it.
    """

    array: Array
    ragged: bool = False
    scope: Scope = "world"


class AllToAll(NamedTuple):
    """Send row ``r`` to rank ``r``; the reply has shape ``(size, n)``, row ``r`` from rank ``r``.

    Attributes:
        array: uint8, shape ``(size, n)`` with the same ``n`` on all ranks.
        scope: The ranks that take part; ``size`` and ``r`` are those within it.
    """

    array: Array
    scope: Scope = "world"


class Broadcast(NamedTuple):
    """Give every rank the array of one.

    Attributes:
        array: The same shape and dtype on all ranks.
        root: The rank whose array everyone gets, counted within the scope.
        scope: The ranks that take part.
    """

    array: Array
    root: int
    scope: Scope = "world"


class SaturatingSum(NamedTuple):
    """Sum small integers and clip the sum to the width that they travel in; every rank gets the same result.

    Of the transports MPI alone has one: for others, `hvd_compress.core.lowering` puts an alltoall and an allgather in
    its place.

    Attributes:
        array: uint8, shape ``(n,)``: codes packed by `Ops.pack`.
        bits: Width of a code.
        zero: The code c stands for the integer ``c - zero``.
        scope: The ranks that take part.
    """

    array: Array
    bits: int
    zero: int
    scope: Scope = "world"


class Chosen(NamedTuple):
    """The coordinates that a rank has sent, where it has not sent something of all.

    Attributes:
        rows: int64, indices of rows, if the bucket is cut into rows of equal length.
        width: Coordinates of a row; the last row is filled up with zeros.
    """

    rows: Array
    width: int = 1


class Exchange(NamedTuple):
    """Result of an exchange.

    Attributes:
        total: The sum over all ranks of what they sent, equal on all ranks: an array of the shape and dtype of the
            input, or what that is decoded from (see `hvd_compress.core.totals`).
        state: The state for the next step.
        left: The input minus what this rank sent, where the exchange was asked to keep it.
        chosen: The coordinates that this rank sent; None if it sent something of every coordinate.
    """

    total: Any
    state: State
    left: Any = None
    chosen: Chosen | None = None


class Branch(NamedTuple):
    """Go on with one of several exchanges; the reply is its `Exchange`.

    A graph-building driver traces all branches, so they must agree in the shapes and dtypes of what they end with.

    Attributes:
        index: Which one: an int or an integer scalar of the framework, the same on all ranks.
        branches: Functions without arguments, each of which starts an exchange.
    """

    index: Any
    branches: tuple[Callable[[], Exchanging], ...]


Collective: TypeAlias = AllReduce | ReduceScatter | AllGather | AllToAll | Broadcast | SaturatingSum
Exchanging: TypeAlias = "Generator[Collective | Branch, Any, Exchange]"
Running: TypeAlias = "Generator[Collective, Any, Exchange]"
"""An exchange without branches."""

M = TypeVar("M")


class Drive(Generic[M]):
    """Resume an exchange message by message.

    Attributes:
        message: What it asks for now; None once it has ended.
        result: What it has ended with; None before that.
        laps: Seconds that it has taken up to each message, and up to the end.
    """

    def __init__(self, exchanging: Generator[M, Any, Exchange]) -> None:
        self._exchanging = exchanging
        self.message: M | None = None
        self.result: Exchange | None = None
        self.laps: list[float] = []
        self.resume(None)

    def resume(self, reply: Any) -> None:
        """Give the reply to `message`, and go on to the next one."""
        self.message, begin = None, time.perf_counter()
        try:
            self.message = self._exchanging.send(reply)
        except StopIteration as end:
            self.result = end.value
        self.laps.append(time.perf_counter() - begin)

    @property
    def ended(self) -> Exchange:
        """The result of an exchange that has ended."""
        assert self.result is not None
        return self.result


def run(exchanging: Generator[M, Any, Exchange], answer: Callable[[M], Any]) -> Exchange:
    """Run an exchange to its end.

    Args:
        exchanging: The exchange.
        answer: Gives the reply to a message.
    """
    drive = Drive(exchanging)
    while drive.message is not None:
        drive.resume(answer(drive.message))
    return drive.ended


def rewrite(
    exchanging: Exchanging, answer: Callable[[Collective | Branch], Generator[Any, Any, Any]]
) -> Generator[Any, Any, Exchange]:
    """Run an exchange with other messages in the place of its own.

    Args:
        exchanging: The exchange.
        answer: Starts a generator for each message, which yields others and ends with the reply.
    """
    drive = Drive(exchanging)
    while drive.message is not None:
        drive.resume((yield from answer(drive.message)))
    return drive.ended


def take_branches(exchanging: Exchanging) -> Running:
    """Resolve every `Branch` on the spot, so that who runs step by step sees collectives only."""

    def answer(message: Collective | Branch) -> Generator[Collective, Any, Any]:
        if isinstance(message, Branch):
            return (yield from take_branches(message.branches[int(message.index)]()))
        return (yield message)

    return rewrite(exchanging, answer)
