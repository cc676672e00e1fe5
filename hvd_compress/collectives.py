"""The messages between a method and whoever performs its collectives.

A method never communicates. Its ``exchange`` is a generator: it yields the collective that it needs and is resumed
with the result. So each method is written once and runs under every driver (numpy, PyTorch, TensorFlow, MPI), which
only has to know these messages.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Literal, NamedTuple, TypeAlias

Array: TypeAlias = Any
"""An array of the framework at work: ``numpy.ndarray``, ``torch.Tensor`` or ``tf.Tensor``."""

State: TypeAlias = Any
"""What a method keeps between steps: nested NamedTuples of arrays and ints; ``()`` where it keeps nothing."""


class World(NamedTuple):
    """The ranks that take part in an exchange.

    Attributes:
        rank: This process, ``0 <= rank < size``.
        size: How many processes there are.
    """

    rank: int
    size: int


class AllReduce(NamedTuple):
    """Combine equally shaped arrays element by element; every rank gets the same result.

    Attributes:
        array: float16, float32, float64, int32 or int64, the same shape and dtype on all ranks.
        op: ``"sum"`` or ``"max"``.
        donate: The driver may overwrite ``array`` with the result.
    """

    array: Array
    op: Literal["sum", "max"] = "sum"
    donate: bool = False


class AllGather(NamedTuple):
    """Give every rank the arrays of all: the reply has shape ``(size, n)``, row ``r`` from rank ``r``.

    Attributes:
        array: uint8, shape ``(n,)``. Other dtypes travel as bytes (``ops.to_bytes``).
        ragged: Each rank has an ``n`` of its own, and the reply is one-dimensional: the arrays one after another. Where
            one ends it must say itself.
    """

    array: Array
    ragged: bool = False


class AllToAll(NamedTuple):
    """Send row ``r`` to rank ``r``; the reply has shape ``(size, n)``, row ``r`` from rank ``r``.

    Attributes:
        array: uint8, shape ``(size, n)`` with the same ``n`` on all ranks.
    """

    array: Array


class Broadcast(NamedTuple):
    """Give every rank the array of one.

    Attributes:
        array: The same shape and dtype on all ranks.
        root: The rank whose array everyone gets.
    """

    array: Array
    root: int


class SaturatingSum(NamedTuple):
    """Sum small integers and clip the sum to the width that they travel in; every rank gets the same result.

    Horovod has no such reduction: `hvd_compress.lowering` puts an alltoall and an allgather in its place. The mpi
    driver has one.

    Attributes:
        array: uint8, shape ``(n,)``: codes packed by `Ops.pack`.
        bits: Width of a code.
        zero: The code c stands for the integer ``c - zero``.
    """

    array: Array
    bits: int
    zero: int


class Exchange(NamedTuple):
    """What an exchange ends with.

    Attributes:
        total: The sum over all ranks of what they sent, decoded; shape and dtype of the input; equal on all ranks.
        sent: What this rank put on the wire, in the form that the method's ``retain`` and ``forget`` understand.
        state: The state for the next step.
        left: What was not sent, where the exchange was asked for that.
    """

    total: Array
    sent: Any
    state: State
    left: Any = None


class Branch(NamedTuple):
    """Go on with one of several exchanges; the reply is its `Exchange`.

    A graph-building driver traces all branches, so they must agree in the shapes and dtypes of what they end with.

    Attributes:
        index: Which one: an int or an integer scalar of the framework, the same on all ranks.
        branches: Functions without arguments, each of which starts an exchange.
    """

    index: Any
    branches: tuple[Callable[[], Exchanging], ...]


Collective: TypeAlias = AllReduce | AllGather | AllToAll | Broadcast | SaturatingSum
Exchanging: TypeAlias = "Generator[Collective | Branch, Any, Exchange]"


def rewrite(exchanging: Exchanging, answer: Callable[[Any], Generator[Any, Any, Any]]) -> Generator[Any, Any, Exchange]:
    """Run an exchange with other messages in the place of its own.

    Args:
        exchanging: The exchange.
        answer: Starts a generator for each message, which yields others and ends with the reply.
    """
    reply: Any = None
    while True:
        try:
            message = exchanging.send(reply)
        except StopIteration as end:
            result: Exchange = end.value
            return result
        reply = yield from answer(message)


def take_branches(exchanging: Exchanging) -> Generator[Collective, Any, Exchange]:
    """Resolve every `Branch` on the spot, so that a driver which runs step by step sees collectives only."""

    def answer(message: Collective | Branch) -> Generator[Collective, Any, Any]:
        if isinstance(message, Branch):
            return (yield from take_branches(message.branches[int(message.index)]()))
        return (yield message)

    return rewrite(exchanging, answer)
