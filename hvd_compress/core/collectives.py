"""Collectives, as messages between a method and a transport.

A method never communicates itself. Its ``exchange`` is a generator that yields collectives and is resumed with their
results. So each method is written once and runs over every transport (see `hvd_compress.transport.protocol`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from hvd_compress.ops.arrays import Array

State: TypeAlias = Any
"""State of a method between steps: nested NamedTuples of arrays and ints; ``()`` for a stateless method."""


Scope: TypeAlias = Literal["world", "node", "across"]
"""Ranks of a collective: all, those on the same node, or those with the same local rank on all nodes."""


class World(NamedTuple):
    """Ranks that take part in an exchange, and their placement on nodes.

    Attributes:
        rank: Rank of this process, ``0 <= rank < size``.
        size: World size.
        local_size: Number of processes on each node. Ranks are numbered node by node.
        even: Whether that holds; if not, or if it is unknown, ``local_size`` is 1.
    """

    rank: int
    size: int
    local_size: int = 1
    even: bool = True

    @property
    def local_rank(self) -> int:
        """Rank of this process within its node."""
        return self.rank % self.local_size

    @property
    def node(self) -> int:
        """Index of this process's node."""
        return self.rank // self.local_size

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.size // self.local_size

    @property
    def multilevel(self) -> bool:
        """Whether there is more than one node, with more than one rank on each."""
        return 1 < self.local_size < self.size

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

    def partition(self, scope: Scope) -> list[range]:
        """Return the sets of ranks that all processes have in a scope, in the order of their first ranks."""
        found = {self._replace(rank=rank).ranks(scope) for rank in range(self.size)}
        return sorted(found, key=lambda ranks: ranks[0])

    def leaves_node(self, scope: Scope) -> bool:
        """Return whether a collective of this scope crosses the network between nodes."""
        return scope != "node" and self.nodes > 1


class AllReduce(NamedTuple):
    """Reduce arrays of equal shape element by element; every rank gets the result.

    Attributes:
        array: float16, float32, float64, int32 or int64; the same shape and dtype on all ranks.
        op: ``"sum"`` or ``"max"``.
        donate: Whether the transport may overwrite ``array`` with the result.
        scope: The ranks that take part.
    """

    array: Array
    op: Literal["sum", "max"] = "sum"
    donate: bool = False
    scope: Scope = "world"


class ReduceScatter(NamedTuple):
    """Sum arrays element by element and give each rank one row: the reply is row ``rank`` of the sum.

    Attributes:
        array: float32, float64 or int32, shape ``(size, n)``, the same on all ranks.
        scope: The ranks that take part; ``size`` and ``rank`` are those within it.
    """

    array: Array
    scope: Scope = "world"


class AllGather(NamedTuple):
    """Gather the arrays of all ranks on every rank: the reply has shape ``(size, n)``, row ``r`` from rank ``r``.

    Attributes:
        array: uint8, shape ``(n,)``. Other dtypes travel as bytes (``ops.to_bytes``).
        ragged: Whether ``n`` may differ between ranks. The reply is then the flat concatenation of the arrays, whose
            contents must tell their lengths.
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
    """Copy the array of one rank to all.

    Attributes:
        array: Any dtype; the same shape and dtype on all ranks.
        root: The rank whose array is copied, counted within the scope.
        scope: The ranks that take part.
    """

    array: Array
    root: int
    scope: Scope = "world"


class SaturatingSum(NamedTuple):
    """Sum small integers and clip the sum to their bit width; every rank gets the result.

    Only the MPI transport supports it. For others, `hvd_compress.transport.lowering` replaces it by an alltoall and an
    allgather.

    Attributes:
        array: uint8, shape ``(n,)``: codes packed by `Ops.pack`.
        bits: Width of a code.
        zero: Code of the integer 0: code c encodes ``c - zero``.
        scope: The ranks that take part.
    """

    array: Array
    bits: int
    zero: int
    scope: Scope = "world"


class SentIndices(NamedTuple):
    """Coordinates that a rank sent.

    Attributes:
        rows: int64, indices of rows of equal length that the bucket is split into.
        width: Coordinates per row; the last row is padded with zeros.
    """

    rows: Array
    width: int = 1


class UnsentMask(NamedTuple):
    """Coordinates that no rank of a node sent.

    Attributes:
        mask: uint8, shape of the input: 1 where nothing was sent, 0 elsewhere.
    """

    mask: Array


class Exchange(NamedTuple):
    """Result of an exchange.

    Attributes:
        total: Sum of what all ranks sent, equal on all ranks: an array with the shape and dtype of the input, or its
            encoded form (see `hvd_compress.ops.totals`).
        state: State for the next step.
        error: The input minus what this rank sent, if the exchange was asked to return it.
        sent_indices: Coordinates that this rank, or its node, sent; None if all of them.
    """

    total: Any
    state: State
    error: Any = None
    sent_indices: SentIndices | UnsentMask | None = None


Collective: TypeAlias = AllReduce | ReduceScatter | AllGather | AllToAll | Broadcast | SaturatingSum
Exchanging: TypeAlias = Generator[Collective, Any, Exchange]

M = TypeVar("M")


class Drive(Generic[M]):
    """Run an exchange message by message.

    Attributes:
        message: The current message; None once the exchange has ended.
        result: The result; None before the end.
        laps: Seconds of computation before each message and before the end.
    """

    def __init__(self, exchanging: Generator[M, Any, Exchange]) -> None:
        self._exchanging = exchanging
        self.message: M | None = None
        self.result: Exchange | None = None
        self.laps: list[float] = []
        self.resume(None)

    def resume(self, reply: Any) -> None:
        """Reply to `message` and continue to the next one."""
        self.message, begin = None, time.perf_counter()
        try:
            self.message = self._exchanging.send(reply)
        except StopIteration as end:
            self.result = end.value
        self.laps.append(time.perf_counter() - begin)

    @property
    def ended(self) -> Exchange:
        """Result of an exchange that has ended."""
        assert self.result is not None
        return self.result


def run(exchanging: Generator[M, Any, Exchange], answer: Callable[[M], Any]) -> Exchange:
    """Run an exchange to its end.

    Args:
        exchanging: The exchange.
        answer: Returns the reply to a message.
    """
    drive = Drive(exchanging)
    while drive.message is not None:
        drive.resume(answer(drive.message))
    return drive.ended


def rewrite(exchanging: Exchanging, answer: Callable[[Collective], Generator[Collective, Any, Any]]) -> Exchanging:
    """Run an exchange, replacing its collectives by others.

    Args:
        exchanging: The exchange.
        answer: Starts a generator for each collective, which yields other collectives and returns the reply.
    """
    drive = Drive(exchanging)
    while (message := drive.message) is not None:
        drive.resume((yield from answer(message)))
    return drive.ended
