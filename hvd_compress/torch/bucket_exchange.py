"""Exchange one bucket in one step: collect its gradients, exchange them, write the result to the gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

import torch
from torch import Tensor

from hvd_compress.core.collectives import Collective, Exchange
from hvd_compress.errors import CompressionError, ExchangeError
from hvd_compress.ops.torch_devices import exactly
from hvd_compress.ops.totals import dense
from hvd_compress.torch.bucket_state import BucketState
from hvd_compress.torch.entry import Entry
from hvd_compress.transport.protocol import InFlight, Transport


class BucketExchange:
    """Exchange of a bucket in one step.

    Args:
        owner: The bucket with its state.
        transport: Transport of its collectives.
        prefix: Prefix of the names of its collectives.
        replaces: Whether results are written to the gradients.
        admits: Returns whether a message may be started now.
        count: Called with each message when it is started.

    Attributes:
        begun: Whether the exchange has begun.
        error: Error of the exchange, if it failed.
    """

    def __init__(
        self,
        owner: BucketState,
        transport: Transport,
        prefix: str,
        replaces: bool,
        admits: Callable[[Collective], bool],
        count: Callable[[Collective], None],
    ) -> None:
        self.bucket, self.ops = owner.bucket, owner.ops
        self._owner = owner
        self._transport = transport
        self._name = f"{prefix}.{self.bucket.key}"
        self._replaces = replaces
        self._admits, self._count = admits, count
        self._buffer: Tensor | None = None
        self._residual: Tensor | None = None
        self._entries: dict[int, Entry] = {}
        self._flight: InFlight | None = None
        self._result: Exchange | None = None
        self.begun = False
        self.error: ExchangeError | None = None

    @property
    def busy(self) -> bool:
        """Whether the exchange has begun and not yet ended."""
        return self._flight is not None

    @property
    def across(self) -> bool:
        """Whether its next collective is one across nodes."""
        return self._flight is not None and self._flight.scope == "across"

    @property
    def entries(self) -> Collection[Entry]:
        """The gradients so far."""
        return self._entries.values()

    def put(self, entry: Entry, position: int, scale: float) -> float | Tensor:
        """Copy a gradient to its place; start the exchange after the last one.

        That of a frozen parameter counts as zero, and its state is cleared. If this rank has not used the parameter,
        its residual stays for a later step.

        Args:
            entry: The gradient.
            position: Index within the bucket.
            scale: Loss scale of the gradient.

        Returns:
            A number that is inf or nan if the gradient is not finite: a float on the CPU, else a scalar tensor.
        """
        buffer, span, residual = self._open(), self._owner.spans[position], self._residual
        self._entries[position] = entry
        # A gradient that is not finite must not reach the method: it would corrupt scales and other coordinates.
        if entry.frozen:
            peak = self.ops.fill(buffer, span, torch.zeros_like(entry.grad), scale)
        elif residual is None or not entry.used:
            peak = self.ops.fill(buffer, span, entry.grad, scale)
        else:
            peak = self.ops.absorb(buffer, residual, span, entry.grad, scale)
        if len(self._entries) == len(self._owner.spans):
            self.start()
        return peak

    def _open(self) -> Tensor:
        """Return the buffer of the gradients of this step."""
        if self._buffer is None:
            self._buffer, self._residual = self._owner.buffer(), self._owner.residual
        return self._buffer

    def _where(self, what: Callable[[Entry], bool]) -> list[int]:
        return [position for position, entry in self._entries.items() if what(entry)]

    def start(self) -> None:
        """Start the exchange; missing gradients count as zero."""
        if self.begun:
            return
        self.begun = True
        buffer = self._open()
        for position, span in enumerate(self._owner.spans):
            if position not in self._entries:
                buffer[span] = 0 if self._residual is None else self._residual[span]
        state = self._owner.without(self._owner.state, self._where(lambda entry: entry.frozen))
        state = self._owner.without(state, self._where(lambda entry: not entry.used), residual=True)
        if self._residual is None:
            self._buffer = None  # the method may overwrite it
        with exactly(self.ops.device):  # backward may run inside the user's autocast
            flight = InFlight(
                self._owner.method,
                self.ops,
                self.bucket,
                buffer,
                state,
                self._transport,
                self._name,
                count=self._count,
                admits=self._admits,
                compensated=True,
            )
        self._note(flight)

    def _note(self, flight: InFlight) -> None:
        """Keep the exchange while it is in flight, then its result only."""
        self._result = flight.result
        self._flight = flight if self._result is None else None

    def poll(self) -> None:
        """Advance as far as possible without waiting."""
        while self._flight is not None and self._flight.ready():
            self.wait()

    def wait(self) -> None:
        """Wait for the collective in flight, and continue to the next one.

        An error in a reply is stored in `error`, so that all ranks complete the other buckets first.
        """
        assert self._flight is not None
        try:
            with exactly(self.ops.device):
                self._flight.go_on()
            self._note(self._flight)
        except ExchangeError as error:
            self.error, self._flight = error, None

    def settle(self, commit: bool) -> None:
        """Commit the new state, or keep the one from before the step."""
        if commit:
            assert self._result is not None
            idle, unused = self._where(lambda entry: not entry.used), self._where(lambda entry: not entry.used_anywhere)
            state = self._owner.rejoined(self._result.state, idle, unused)
            self._owner.commit(self._owner.without(state, self._where(lambda entry: entry.frozen)))
        if self._residual is not None and self._buffer is not None:
            self._owner.recycle(self._buffer, self._residual)
        self._residual = self._buffer = None

    @property
    def can_deliver(self) -> bool:
        """Whether the sum is complete, and replaces the gradients."""
        return self._replaces and self._result is not None and self._result.total is not None

    def deliver(self, factor: float) -> float | Tensor:
        """Overwrite the gradients with the sum over the ranks, times a factor, and drop the sum.

        Those whose parameter no rank has used stay as they are.

        Returns:
            A number that is inf or nan if a result is not finite: a float on the CPU, else a scalar tensor.
        """
        assert self._result is not None
        spans = self._owner.spans
        pieces = [(spans[position], entry.grad) for position, entry in self._entries.items() if entry.used_anywhere]
        with exactly(self.ops.device):
            peak = self.ops.deliver(self._result.total, pieces, factor) if pieces else 0.0
        self._result = self._result._replace(total=None)
        for entry in self.entries:
            entry.note_result()
        return peak

    def deliver_one(self, position: int, factor: float, into: Tensor) -> float | Tensor:
        """Write the sum at a position, times a factor, to a tensor; return a number as `deliver` does."""
        assert self._result is not None
        with exactly(self.ops.device):
            self._result = self._result._replace(total=dense(self.ops, self._result.total))
            return self.ops.deliver(self._result.total, [(self._owner.spans[position], into)], factor)

    def halt(self) -> None:
        """Wait for the collective in flight, if any, and stop there."""
        if self._flight is not None:
            self._flight.halt()

    def drain(self) -> None:
        """Complete an abandoned exchange, so that its collectives cannot match those of the next step."""
        with suppress(CompressionError):
            self.start()
            while self.busy:
                self.wait()
