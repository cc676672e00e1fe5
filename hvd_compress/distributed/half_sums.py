"""Sums of a model's buckets in half precision, one by one, of which none is lost to an overflow."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from hvd_compress.core.collectives import AllReduce, Drive
from hvd_compress.distributed.transport import GroupTransport
from hvd_compress.torch.passthrough import Passthrough
from hvd_compress.transport.protocol import Handle


class _Sum(NamedTuple):
    """Sum in flight; its buffer keeps the gradients of this rank until it has arrived."""

    future: Future[Tensor]
    buffer: Tensor
    drive: Drive[Any]
    handle: Handle


class HalfSums:
    """Sums of one step.

    A sum beyond the range of float16 is not finite on any rank. It is repeated without compression at the end of the
    step, when all ranks start the same collectives in the same order.

    Args:
        passthrough: Compresses to half precision.
    """

    def __init__(self, passthrough: Passthrough) -> None:
        self._passthrough = passthrough
        self._running: deque[_Sum] = deque()
        self._overflowed: list[_Sum] = []

    def add(self, buffer: Tensor, transport: GroupTransport, factor: float) -> Future[Tensor]:
        """Start to sum a buffer, which the result times a factor replaces; finish others that have arrived."""
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        array, drive = self._passthrough.compress(buffer)
        self._running.append(_Sum(future, buffer, drive, transport.start(AllReduce(array, donate=True), "")))
        while not buffer.is_cuda and self._running[0].handle.done() and len(self._running) > 1:
            self._finish(self._running.popleft(), factor)
        return future

    def finish(self, transport: GroupTransport, factor: float) -> None:
        """Finish all sums of the step."""
        while self._running:
            self._finish(self._running.popleft(), factor)
        for one in self._overflowed:
            exact = transport.start(AllReduce(one.buffer.clone(), donate=True), "").result()
            one.future.set_result(one.buffer.copy_(exact).mul_(factor))
        self._overflowed = []

    def _finish(self, one: _Sum, factor: float) -> None:
        total = self._passthrough.decompress(one.handle.result(), one.drive)
        low, high = torch.aminmax(total) if total.numel() else (total.sum(), total.sum())
        if torch.isfinite(high - low):
            one.future.set_result(one.buffer.copy_(total).mul_(factor))
        else:
            self._overflowed.append(one)
