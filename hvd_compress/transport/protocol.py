"""Transports, which perform collectives, and `InFlight` exchanges over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import Collective, Drive, Exchange, Exchanging, Scope, State, World
from hvd_compress.core.method import Method, compensate
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.transport.lowering import lower


class Handle(Protocol):
    """Handle of a collective in flight."""

    def done(self) -> bool:
        """Return whether the reply has arrived."""

    def result(self) -> Array:
        """Wait for the reply and return it.

        Raises:
            ExchangeError: If a reply of another rank has the wrong length.
        """


class Done(NamedTuple):
    """A collective that is over.

    Attributes:
        reply: Its result.
    """

    reply: Array

    def done(self) -> bool:
        """Return whether the reply has arrived: always."""
        return True

    def result(self) -> Array:
        """Return the reply."""
        return self.reply


class Transport(Protocol):
    """Interface of transports: perform collectives over a set of ranks."""

    @property
    def world(self) -> World:
        """Rank and size of the ranks that take part."""

    @property
    def missing(self) -> frozenset[type]:
        """Kinds of collectives that it does not support; `lower` replaces them."""

    @property
    def epoch(self) -> Hashable:
        """Identifier of the set of ranks; changes when they change, and when collectives in flight are lost."""

    def start(self, message: Collective, name: str) -> Handle:
        """Start a collective.

        Args:
            message: The collective; only the contents of its array may differ between ranks.
            name: The same on all ranks, and unique among the collectives in flight.
        """


class TrainingTransport(Transport, Protocol):
    """A transport for the training of a model: of many buckets at a time, and of ranks that may change between steps.

    Attributes:
        ordered: Collectives of this transport are matched by the order in which the ranks start them, not by names.
    """

    @property
    def ordered(self) -> bool:
        """Whether all ranks must start collectives in the same order."""

    @property
    def members(self) -> Sequence[int]:
        """The ranks that take part, as the job numbers them; empty for all ranks."""

    def channels(self, keys: Sequence[str]) -> Mapping[str, Transport] | None:
        """Return a transport for each bucket, if its collectives need not be ordered with those of others.

        Args:
            keys: Keys of the buckets, the same on all ranks.
        """

    def connect(self) -> None:
        """Make collectives within a node and across nodes possible. All ranks call it at the same time.

        Raises:
            UnsupportedError: If these ranks do not support them.
        """

    def renewed(self) -> TrainingTransport:
        """Return the transport of the current ranks."""


def ignore(message: Collective) -> None:
    """Count nothing."""


def always(message: Collective) -> bool:
    """Admit every message."""
    return True


def _compensated(method: Method, ops: Ops, bucket: Bucket, x: Array, state: State, world: World) -> Exchanging:
    """Add the residual within the exchange, so that its time counts."""
    exchanging = method.exchange(ops, bucket, compensate(ops, method, x, state), state, world)
    del x
    return (yield from exchanging)


class InFlight:
    """Exchange in flight.

    Args:
        method: The method.
        ops: Primitives of the framework that ``x`` belongs to.
        bucket: Shapes and dtype of ``x``.
        x: The gradient, shape ``(bucket.numel,)``; may be overwritten.
        state: State of the method.
        transport: Transport that performs the collectives.
        name: Prefix of the names of the collectives.
        count: Called with each message.
        admits: Returns whether a message may be started now.
        compensated: Whether ``x`` already includes the residual.
    """

    def __init__(
        self,
        method: Method,
        ops: Ops,
        bucket: Bucket,
        x: Array,
        state: State,
        transport: Transport,
        name: str,
        count: Callable[[Collective], None] = ignore,
        admits: Callable[[Collective], bool] = always,
        compensated: bool = False,
    ) -> None:
        start = method.exchange if compensated else partial(_compensated, method)
        exchanging = start(ops, bucket, x, state, transport.world)
        del x  # so that the method can free its memory
        self._drive = Drive(lower(exchanging, ops, transport.world, transport.missing))
        self._transport = transport
        self._name = name
        self._count, self._admits = count, admits
        self._handle: Handle | None = None
        # By scope: groups of ranks may take different branches, and meet again in a collective of another scope.
        self._rounds: Counter[Scope] = Counter()
        self._start_admitted()

    def _start_admitted(self) -> None:
        """Start the next collective if `admits` allows it."""
        if self._drive.message is not None and self._handle is None and self._admits(self._drive.message):
            self._start(self._drive.message)

    def _start(self, message: Collective) -> Handle:
        self._count(message)
        self._handle = self._transport.start(message, f"{self._name}.{message.scope}.{self._rounds[message.scope]}")
        self._rounds[message.scope] += 1
        return self._handle

    @property
    def result(self) -> Exchange | None:
        """Result of the exchange; None while it is in flight."""
        return self._drive.result

    @property
    def ended(self) -> Exchange:
        """Result of the exchange, which must have ended."""
        return self._drive.ended

    @property
    def scope(self) -> Scope | None:
        """Scope of the current collective; None once the exchange has ended."""
        return None if self._drive.message is None else self._drive.message.scope

    @property
    def laps(self) -> list[float]:
        """Seconds of computation before each message and after the last one."""
        return self._drive.laps

    def ready(self) -> bool:
        """Return whether `go_on` would return without waiting."""
        self._start_admitted()
        return self._handle is not None and self._handle.done()

    def go_on(self) -> None:
        """Wait for the reply in flight, and continue to the next message or to the end.

        Raises:
            ExchangeError: If a reply of another rank has the wrong length.
        """
        message = self._drive.message
        assert message is not None
        handle = self._start(message) if self._handle is None else self._handle
        del message  # frees its memory before the reply is read
        self._handle = None
        self._drive.resume(handle.result())
        self._start_admitted()

    def halt(self) -> None:
        """Wait for the collective in flight, if any, and stop there."""
        if self._handle is not None:
            self._handle.result()
