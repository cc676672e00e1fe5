"""A bucket in use: filled by gradients, exchanged, emptied."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvd_compress.collectives import AllReduce, Collective, Exchange, State, take_branches
from hvd_compress.errors import CompressionError, ExchangeError
from hvd_compress.group import Group
from hvd_compress.lowering import lower
from hvd_compress.merging import Planned
from hvd_compress.ops.torch_devices import torch_ops
from hvd_compress.state import flatten, unflatten
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
        all_here: Tells whether all ranks are known to take part in this step.

    Attributes:
        group: The ranks that take part; may be replaced between steps.
    """

    def __init__(
        self,
        planned: Planned,
        device: torch.device,
        prefix: str,
        group: Group,
        meter: Meter,
        all_here: Callable[[], bool],
    ) -> None:
        self.bucket, self.method = planned.bucket, planned.method
        self.ops = torch_ops(device)
        self.state: State = self.method.init(self.ops, self.bucket, group.world.size)
        self._prefix = f"{prefix}.{self.bucket.key}"
        self.group = group
        self._meter = meter
        self._all_here = all_here
        ends = accumulate(self.bucket.sizes)
        self._spans = [slice(end - size, end) for end, size in zip(ends, self.bucket.sizes, strict=True)]
        self._reset()

    def _reset(self) -> None:
        self._buffer: Tensor | None = None
        self._missing = set(range(len(self._spans)))
        self._frozen: list[int] = []
        self._running: Generator[Collective, Any, Exchange] | None = None
        self._held: Collective | None = None
        self._pending: Pending | None = None
        self._round = 0
        self._result: Exchange | None = None
        self._totals: list[Tensor] = []
        self._left = 0
        self.error: ExchangeError | None = None

    @property
    def busy(self) -> bool:
        """Whether the exchange has begun and not yet ended."""
        return self._running is not None and self._result is None and self.error is None

    def holds(self, position: int) -> bool:
        """Whether the gradient at this place has arrived in this step."""
        return position not in self._missing

    def put(self, position: int, grad: Tensor, scale: float = 1.0, frozen: bool = False) -> float | Tensor:
        """Copy a gradient into its place; start the exchange when it was the last.

        Args:
            position: The place.
            grad: The gradient.
            scale: By which a loss scaler has multiplied it.
            frozen: Its parameter is not trained: it counts as zero, and what was kept of it is forgotten.

        Returns:
            A number that is inf or nan if the gradient is not finite: on the CPU a float, else a scalar of the device.
        """
        if self._buffer is None:
            self._buffer = self.ops.empty(self.bucket.numel, self.bucket.dtype)
        if frozen:
            self._frozen.append(position)
            grad = torch.zeros_like(grad)
        # A gradient that is not finite must not reach the method: it would spoil scales and its neighbours.
        peak = self.ops.fill(self._buffer, self._spans[position], grad, scale)
        self._missing.remove(position)
        if not self._missing:
            self.start()
        return peak

    def start(self) -> None:
        """Begin the exchange; gradients that have not come count as zero."""
        if self._running is not None:
            return
        if self._buffer is None:
            self._buffer = self.ops.empty(self.bucket.numel, self.bucket.dtype)
        for position in self._missing:
            self._buffer[self._spans[position]].zero_()
        self.forget(self._frozen)
        exchanging = self.method.exchange(self.ops, self.bucket, self._buffer, self.state, self.group.world)
        self._running = take_branches(lower(exchanging, self.ops, self.group.world))
        self._buffer = None
        self._advance(None)

    def poll(self) -> None:
        """Go on as far as possible without waiting."""
        self._launch_held()
        while self.busy and self._pending is not None and self._pending.done():
            self._go_on()

    def wait(self) -> None:
        """Wait for the collective on its way and go on to the next."""
        self._launch_held()
        self._go_on()

    def _go_on(self) -> None:
        """Take what has come. A fault in it is kept in `error`, so that all ranks finish the other buckets first."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        try:
            with self._meter.time("wait"):
                reply = pending.wait()
            self._advance(reply)
        except ExchangeError as error:
            self.error = error

    def _advance(self, reply: Tensor | None) -> None:
        assert self._running is not None
        try:
            with torch.autocast(self.ops.device.type, enabled=False):  # backward may run inside the user's autocast
                message = self._running.send(reply)
        except StopIteration as end:
            self._result = end.value
            return
        self._held = message
        self._launch_held()

    def _launch_held(self) -> None:
        """Launch the collective that is next, unless a rank might be missing: only a sum survives that in Horovod."""
        message = self._held
        if message is None or not (isinstance(message, AllReduce) or self._all_here()):
            return
        self._held = None
        self._meter.bytes_sent += message.array.numel() * message.array.element_size()
        self._pending = launch(message, f"{self._prefix}.{self._round}", self.group)
        self._round += 1

    def take(self, position: int) -> Tensor:
        """The sum over the ranks of the gradient at this place; each is given out once, and the last one frees them."""
        assert self._result is not None
        if not self._totals:
            self._totals = self.ops.split(self._result.total, self.bucket.sizes)
            self._result = self._result._replace(total=None)
            self._left = len(self._totals)
        total = self._totals[position].view(self.bucket.shapes[position])
        self._left -= 1
        if not self._left:
            self._totals = []
        return total

    def close(self, commit: bool) -> None:
        """End the step.

        Args:
            commit: Take over the new state; else keep the one from before the step.
        """
        if commit:
            assert self._result is not None
            self.state = self._result.state
            self.forget(self._frozen)
        self._reset()

    def drain(self) -> None:
        """Finish an exchange whose result nobody wants, so that its collectives do not meet those of the next step."""
        with suppress(CompressionError):
            self.start()
            while self.busy and (self._pending is not None or self._held is not None):
                self.wait()

    def settle(self) -> None:
        """Wait for the collective under way and go no further."""
        if self._pending is not None:
            self._pending.wait()

    def forget(self, positions: Iterable[int]) -> None:
        """Clear what is kept of some gradients, as far as it is kept coordinate by coordinate."""
        vectors = [leaf for leaf in flatten(self.state).values() if isinstance(leaf, Tensor)]
        for position in positions:
            for vector in vectors:
                if vector.shape == (self.bucket.numel,):
                    vector[self._spans[position]] = 0

    def read(self) -> dict[str, Any]:
        """The state as named leaves: copies in numpy, and ints."""
        return {
            path: np.array(leaf.cpu().numpy()) if isinstance(leaf, Tensor) else leaf
            for path, leaf in flatten(self.state).items()
        }

    def write(self, leaves: Mapping[str, Any]) -> None:
        """Take over a state of the same structure, in the form of `read` or with tensors in the place of arrays."""
        new = {
            path: torch.as_tensor(leaves[path]).to(leaf.device, leaf.dtype, copy=True)
            if isinstance(leaf, Tensor)
            else int(leaves[path])
            for path, leaf in flatten(self.state).items()
        }
        self.state = unflatten(self.state, new)
