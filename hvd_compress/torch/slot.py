"""A bucket in use: filled by gradients, exchanged, emptied."""

from __future__ import annotations

from collections.abc import Generator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hvd_compress.collectives import Collective, Exchange, State, take_branches
from hvd_compress.group import Group
from hvd_compress.lowering import lower
from hvd_compress.merging import Planned
from hvd_compress.ops.torch import TorchOps
from hvd_compress.stats import Meter
from hvd_compress.torch.driver import Pending, launch


class Slot:
    """One bucket of a plan, with its state.

    A step fills it, runs its exchange and ends with `close`, which takes over the new state or drops it.

    Args:
        planned: The bucket and its method.
        device: Where its gradients are.
        prefix: Of the names of its collectives.
        group: The ranks that take part.
        meter: Counts bytes and time.
    """

    def __init__(self, planned: Planned, device: torch.device, prefix: str, group: Group, meter: Meter) -> None:
        self.bucket, self.method = planned.bucket, planned.method
        self.ops = TorchOps(device)
        self.state: State = self.method.init(self.ops, self.bucket, group.world.size)
        self._prefix = f"{prefix}.{self.bucket.key}"
        self._group = group
        self._meter = meter
        ends = accumulate(self.bucket.sizes)
        self._spans = [slice(end - size, end) for end, size in zip(ends, self.bucket.sizes, strict=True)]
        self._reset()

    def _reset(self) -> None:
        self._buffer: Tensor | None = None
        self._missing = set(range(len(self._spans)))
        self._running: Generator[Collective, Any, Exchange] | None = None
        self._pending: Pending | None = None
        self._round = 0
        self._result: Exchange | None = None

    @property
    def busy(self) -> bool:
        """Whether the exchange has begun and not yet ended."""
        return self._running is not None and self._result is None

    def holds(self, position: int) -> bool:
        """Whether the gradient at this place has arrived in this step."""
        return position not in self._missing

    def put(self, position: int, grad: Tensor) -> Tensor:
        """Copy a gradient into its place; start the exchange when it was the last.

        Returns:
            Its largest magnitude, a scalar; inf or nan if the gradient is not finite.
        """
        if self._buffer is None:
            self._buffer = torch.empty(self.bucket.numel, dtype=getattr(torch, self.bucket.dtype), device=grad.device)
        place = self._buffer[self._spans[position]]
        place.view(self.bucket.shapes[position]).copy_(grad)
        peak: Tensor = torch.linalg.vector_norm(place, ord=torch.inf)
        # A gradient that is not finite must not reach the method: it would spoil scales and its neighbours.
        if grad.device.type != "cpu":
            place.copy_(torch.where(peak.isfinite(), place, 0.0))  # no waiting for the device
        elif not peak.isfinite():
            place.zero_()
        self._missing.discard(position)
        if not self._missing:
            self.start()
        return peak

    def start(self) -> None:
        """Begin the exchange; gradients that have not come count as zero."""
        if self._running is not None:
            return
        if self._buffer is None:
            self._buffer = self.ops.zeros((self.bucket.numel,), self.bucket.dtype)
        for position in self._missing:
            self._buffer[self._spans[position]].zero_()
        exchanging = self.method.exchange(self.ops, self.bucket, self._buffer, self.state, self._group.world)
        self._running = take_branches(lower(exchanging, self.ops, self._group.world))
        self._buffer = None
        self._advance(None)

    def poll(self) -> None:
        """Go on as far as possible without waiting."""
        while self.busy and self._pending is not None and self._pending.done():
            self._advance(self._pending.wait())

    def wait(self) -> None:
        """Wait for the collective on its way and go on to the next."""
        assert self._pending is not None
        with self._meter.time("wait"):
            reply = self._pending.wait()
        self._advance(reply)

    def _advance(self, reply: Tensor | None) -> None:
        assert self._running is not None
        try:
            with torch.autocast(self.ops.device.type, enabled=False):  # backward may run inside the user's autocast
                message = self._running.send(reply)
        except StopIteration as end:
            self._result, self._pending = end.value, None
            return
        self._meter.bytes_sent += message.array.numel() * message.array.element_size()
        self._pending = launch(message, f"{self._prefix}.{self._round}", self._group)
        self._round += 1

    def total(self, position: int) -> Tensor:
        """The sum over the ranks of the gradient at this place: a view that the caller may overwrite."""
        assert self._result is not None
        total: Tensor = self._result.total[self._spans[position]].view(self.bucket.shapes[position])
        return total

    def close(self, commit: bool) -> None:
        """End the step.

        Args:
            commit: Take over the new state; else keep the one from before the step.
        """
        assert self._result is not None
        if commit:
            self.state = self._result.state
        self._reset()
