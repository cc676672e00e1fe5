"""Transports perform the collectives of a method; an `InFlight` exchange goes over any of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Protocol, Self

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import Array, Collective, Drive, Exchange, Exchanging, State, World, take_branches
from hvd_compress.core.lowering import lower
from hvd_compress.methods.base import Method, compensate
from hvd_compress.ops import Ops


class Handle(Protocol):
    """A collective that has been started."""

    def done(self) -> bool:
        """Return whether the reply has arrived."""

    def result(self) -> Array:
        """Wait for the reply and return it.

        Raises:
            ExchangeError: If the replies of other ranks do not fit.
        """


class Transport(Protocol):
    """Performs collectives over a set of ranks."""

    @property
    def world(self) -> World:
        """This rank among those that take part."""

    @property
    def missing(self) -> frozenset[type]:
        """The kinds of collectives that it cannot perform, for `lower` to replace."""

    @property
    def epoch(self) -> Hashable:
        """Another one for each set of ranks, and each time that all collectives in flight are gone."""

    def start(self, message: Collective, name: str) -> Handle:
        """Start a collective.

        Args:
            message: The collective, the same on all ranks but for the contents of its array.
            name: The same on all ranks, and not that of another collective in flight.
        """


class Renewable(Transport, Protocol):
    """A transport for the training of a model: of many buckets at a time, and of ranks that may change between steps.

    Attributes:
        ordered: Collectives are matched by the order in which the ranks start them, not by their names.
    """

    @property
    def ordered(self) -> bool:
        """Whether all ranks must start collectives in the same order."""

    def renewed(self) -> Self:
        """Return the transport of the ranks of now."""


def ignore(message: Collective) -> None:
    """Count nothing."""


def always(message: Collective) -> bool:
    """Admit every message."""
    return True


def _compensated(method: Method, ops: Ops, bucket: Bucket, x: Array, state: State, world: World) -> Exchanging:
    """Add the residual, as a part of the exchange whose time counts."""
    exchanging = method.exchange(ops, bucket, compensate(ops, method, x, state), state, world)
    del x
    return (yield from exchanging)


class InFlight:
    """An exchange in flight.

    Args:
        method: The method that exchanges.
        ops: The primitives of the framework that ``x`` belongs to.
        bucket: The bucket that ``x`` is.
        x: The gradient, shape ``(bucket.numel,)``; may be overwritten.
        state: The state of the method.
        transport: Performs its collectives.
        name: Prefix of the names of its collectives.
        count: Called with each message.
        admits: Tells whether a message may be started yet.
        compensated: The residual has been added to ``x`` before.
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
        del x  # the method's alone, which may need its memory
        self._drive = Drive(take_branches(lower(exchanging, ops, transport.world, transport.missing)))
        self._transport = transport
        self._name = name
        self._count, self._admits = count, admits
        self._handle: Handle | None = None
        self._round = 0
        self._start_admitted()

    def _start_admitted(self) -> None:
        """Start the next collective if it may be started."""
        if self._drive.message is not None and self._handle is None and self._admits(self._drive.message):
            self._start(self._drive.message)

    def _start(self, message: Collective) -> Handle:
        self._count(message)
        self._handle = self._transport.start(message, f"{self._name}.{self._round}")
        self._round += 1
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
    def laps(self) -> list[float]:
        """Seconds of its own work before each of its messages, and after the last."""
        return self._drive.laps

    def ready(self) -> bool:
        """Return whether `go_on` would not wait."""
        self._start_admitted()
        return self._handle is not None and self._handle.done()

    def go_on(self) -> None:
        """Wait for the reply under way, and go on to the next message or to the end.

        Raises:
            ExchangeError: If the replies of other ranks do not fit.
        """
        message = self._drive.message
        assert message is not None
        handle = self._start(message) if self._handle is None else self._handle
        del message  # its memory is not needed while the reply is taken in
        self._handle = None
        self._drive.resume(handle.result())
        self._start_admitted()

    def halt(self) -> None:
        """Wait for the collective under way, if it has been started, and go no further."""
        if self._handle is not None:
            self._handle.result()
