"""Exchange one bucket in one step: collect its gradients, exchange them, write the result to the gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from hvd_compress.core.collectives import Collective, Exchange
from hvd_compress.errors import CompressionError, ExchangeError
from hvd_compress.ops.torch_devices import exactly
from hvd_compress.ops.totals import dense
from hvd_compress.torch.bucket_state import BucketState
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
        self._grads: dict[int, Tensor] = {}
        self._missing = set(range(len(owner.spans)))
        self._frozen: list[int] = []
        self._idle: list[int] = []
        self._unused: list[int] = []
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

    def put(
        self, position: int, grad: Tensor, scale: float = 1.0, frozen: bool = False, used: bool = True
    ) -> float | Tensor:
        """Copy a gradient to its place; start the exchange after the last one.

        Args:
            position: Index within the bucket.
            grad: The gradient.
            scale: Loss scale of the gradient.
            frozen: Whether its parameter is frozen: the gradient counts as zero, and its state is cleared.
            used: Whether this rank has used its parameter; otherwise its residual stays for a later step.

        Returns:
            A number that is inf or nan if the gradient is not finite: a float on the CPU, else a scalar tensor.
        """
        buffer, span = self._open(), self._owner.spans[position]
        self._grads[position] = grad
        # A gradient that is not finite must not reach the method: it would corrupt scales and other coordinates.
        if frozen:
            self._frozen.append(position)
            peak = self.ops.fill(buffer, span, torch.zeros_like(grad), scale)
        elif self._residual is None or not used:
            peak = self.ops.fill(buffer, span, grad, scale)
        else:
            peak = self.ops.absorb(buffer, self._residual, span, grad, scale)
        if not used:
            self._idle.append(position)
        self._missing.remove(position)
        if not self._missing:
            self.start()
        return peak

    def _open(self) -> Tensor:
        """Return the buffer of the gradients of this step."""
        if self._buffer is None:
            self._buffer, self._residual = self._owner.buffer(), self._owner.residual
        return self._buffer

    def start(self) -> None:
        """Start the exchange; missing gradients count as zero."""
        if self.begun:
            return
        self.begun = True
        buffer = self._open()
        for position in self._missing:
            span = self._owner.spans[position]
            buffer[span] = 0 if self._residual is None else self._residual[span]
        state = self._owner.without(self._owner.state, self._frozen)
        state = self._owner.without(state, self._idle, residual=True)
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
            state = self._owner.rejoined(self._result.state, self._idle, self._unused)
            self._owner.commit(self._owner.without(state, self._frozen))
        if self._residual is not None and self._buffer is not None:
            self._owner.recycle(self._buffer, self._residual)
        self._residual = self._buffer = None

    def leave(self, position: int) -> None:
        """Leave a gradient and its state as they were before the step, as no rank has used its parameter."""
        self._unused.append(position)
        del self._grads[position]

    @property
    def can_deliver(self) -> bool:
        """Whether the sum is complete, and replaces the gradients."""
        return self._replaces and self._result is not None and self._result.total is not None

    def deliver(self, factor: float) -> float | Tensor:
        """Overwrite the gradients with the sum over the ranks, times a factor, and drop the sum.

        Returns:
            A number that is inf or nan if a result is not finite: a float on the CPU, else a scalar tensor.
        """
        assert self._result is not None
        pieces = [(self._owner.spans[position], grad) for position, grad in self._grads.items()]
        with exactly(self.ops.device):
            peak = self.ops.deliver(self._result.total, pieces, factor) if pieces else 0.0
        self._result = self._result._replace(total=None)
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
