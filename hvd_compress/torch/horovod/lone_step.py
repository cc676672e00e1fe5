"""A step in which Horovod sums each gradient by itself, without compression or in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvd_compress.core.collectives import AllReduce, Drive
from hvd_compress.core.method import Method
from hvd_compress.engine.stats import Meter
from hvd_compress.torch.passthrough import Passthrough
from hvd_compress.torch.reducer import Reducer


class LoneTicket(NamedTuple):
    """Context from ``compress`` to ``decompress``.

    Attributes:
        reducer: Reducer of the gradient.
        step: The step.
        key: Key of the parameter.
        grad: The gradient of this rank.
        drive: Of `Passthrough`.
    """

    reducer: Reducer
    step: LoneStep
    key: int
    grad: Tensor
    drive: Drive[Any]


class LoneStep:
    """A step that `Reducer.alone` has begun.

    A sum beyond the range of float16 is not finite on any rank. It is repeated without compression at the end of the
    step, before the gradients are used.

    Args:
        method: The linear method to sum by.
        meter: Counters of bytes and time.
        full: Returns Horovod's result for a 1 on each rank, given the world size.
    """

    def __init__(self, method: Method, meter: Meter, full: Callable[[int], float]) -> None:
        self._full = full
        self._may_overflow = method.retains
        self._passthrough = Passthrough(method, meter)
        self._missing = 0
        self._sums: list[tuple[LoneTicket, Tensor]] = []

    def compress(self, reducer: Reducer, key: int, grad: Tensor) -> tuple[Tensor, LoneTicket]:
        """Return the tensor that Horovod is to sum, and the context for `decompress`."""
        self._missing += 1
        array, drive = self._passthrough.compress(grad)
        return array, LoneTicket(reducer, self, key, grad.detach(), drive)  # Horovod gives `grad` another storage

    def decompress(self, tensor: Tensor, ticket: LoneTicket) -> Tensor:
        """Return a reduced gradient, which changes once more if it has overflown; the last one ends the step."""
        total = self._passthrough.decompress(tensor, ticket.drive)
        if self._may_overflow and total.numel():
            self._sums.append((ticket, total))
        self._missing -= 1
        if not self._missing:
            self._repeat(ticket.reducer)
            ticket.reducer.end_alone()
        return total

    def _repeat(self, reducer: Reducer) -> None:
        """Repeat the sums that have overflown."""
        sums, self._sums = self._sums, []
        if not sums:
            return
        peaks = torch.stack([torch.linalg.vector_norm(total, ord=torch.inf).float() for _, total in sums])
        fits = torch.isfinite(peaks).tolist()
        found = [one for one, fit in zip(sums, fits, strict=True) if not fit]
        found.sort(key=lambda one: reducer.name(one[0].key))  # Horovod's order may differ between ranks
        if not found:
            return
        vector = torch.cat([ticket.grad.flatten().float() for ticket, _ in found])
        name = f"hvd_compress.{reducer.label}.exact"
        exact: Tensor = reducer.transport.start(AllReduce(vector, donate=True), name).result()
        exact *= self._full(reducer.world.size) / reducer.world.size
        for (_, total), piece in zip(found, torch.split(exact, [total.numel() for _, total in found]), strict=True):
            total.copy_(piece.view_as(total))
