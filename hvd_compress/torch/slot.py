"""A bucket in use: filled by gradients, exchanged, emptied."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any

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

    A step fills it, runs its exchange, takes over the new state or drops it (`settle`), and ends with `close`.

    Where the method lends its residual, the buffer is filled with residual plus gradient, and becomes the next residual
    once the step counts. The old residual stays as it is until then, so a step is undone by not taking over its state.
    After that its memory is the next step's buffer.

    Args:
        planned: The bucket and its method.
        device: Where its gradients are.
        prefix: Gives that of the names of its collectives.
        group: The ranks that take part.
        meter: Counts bytes and time.
        replaces: The results are to be written to the gradients.
        all_here: Tells whether all ranks are known to take part in this step.

    Attributes:
        group: The ranks that take part; may be replaced between steps.
        narrow: A gradient of this step has a narrower dtype than the bucket.
        error: What went wrong in the exchange of this step.
    """

    def __init__(
        self,
        planned: Planned,
        device: torch.device,
        prefix: Callable[[], str],
        group: Group,
        meter: Meter,
        replaces: bool,
        all_here: Callable[[], bool],
    ) -> None:
        self.bucket, self.method = planned.bucket, planned.method
        self.ops = torch_ops(device)
        self.state: State = self.method.init(self.ops, self.bucket, group.world.size)
        self._prefix = prefix
        self.group = group
        self._meter = meter
        self._replaces = replaces
        self._all_here = all_here
        ends = accumulate(self.bucket.sizes)
        self._spans = [slice(end - size, end) for end, size in zip(ends, self.bucket.sizes, strict=True)]
        self._spare: Tensor | None = None
        self._before: State | None = None
        self._reset()

    def _reset(self) -> None:
        self._buffer: Tensor | None = None
        self._lent: tuple[Tensor, State] | None = None
        self._grads: dict[int, Tensor] = {}
        self.narrow = False
        self._missing = set(range(len(self._spans)))
        self._frozen: list[int] = []
        self._running: Generator[Collective, Any, Exchange] | None = None
        self._held: Collective | None = None
        self._pending: Pending | None = None
        self._round = 0
        self._result: Exchange | None = None
        self.error: ExchangeError | None = None

    @property
    def busy(self) -> bool:
        """Whether the exchange has begun and not yet ended."""
        return self._running is not None and self._result is None and self.error is None

    def holds(self, position: int) -> bool:
        """Whether the gradient at this place has arrived in this step."""
        return position not in self._missing

    def put(self, position: int, grad: Tensor, scale: float = 1.0, frozen: bool = False) -> float | Tensor:
        """Take a gradient to its place; start the exchange when it was the last.

        Args:
            position: The place.
            grad: The gradient.
            scale: By which a loss scaler has multiplied it.
            frozen: Its parameter is not trained: it counts as zero, and what was kept of it is forgotten.

        Returns:
            A number that is inf or nan if the gradient is not finite: on the CPU a float, else a scalar of the device.
        """
        buffer, span = self._open(), self._spans[position]
        self._grads[position] = grad
        self.narrow = self.narrow or grad.dtype != buffer.dtype
        if frozen:
            self._frozen.append(position)
            grad = torch.zeros_like(grad)
        # A gradient that is not finite must not reach the method: it would spoil scales and its neighbours.
        if self._lent is None:
            peak = self.ops.fill(buffer, span, grad, scale)
        else:
            peak = self.ops.absorb(buffer, self._lent[0], span, grad, scale)
        self._missing.remove(position)
        if not self._missing:
            self.start()
        return peak

    def _open(self) -> Tensor:
        """Return the buffer that the gradients of this step go to."""
        if self._buffer is None:
            self._before = None  # the last step cannot be undone any more
            self._lent = self.method.lend(self.state) if self._replaces and self.ops.absorbs else None
            spare, self._spare = self._spare, None
            self._buffer = self.ops.empty(self.bucket.numel, self.bucket.dtype) if spare is None else spare
        return self._buffer

    def start(self) -> None:
        """Begin the exchange; gradients that have not come count as zero."""
        if self._running is not None:
            return
        self._forget(self._frozen)
        buffer, state = self._open(), self.state
        for position in self._missing if self._lent is None else {*self._missing, *self._frozen}:
            span = self._spans[position]
            buffer[span] = 0 if self._lent is None else self._lent[0][span]
        if self._lent is not None:
            state = self._lent[1]
        exchanging = self.method.exchange(self.ops, self.bucket, buffer, state, self.group.world)
        self._running = take_branches(lower(exchanging, self.ops, self.group.world))
        if self._lent is None:
            self._buffer = None  # the method's from here on
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
        self._pending = launch(message, f"{self._prefix()}.{self.bucket.key}.{self._round}", self.group)
        self._round += 1

    def settle(self, commit: bool) -> None:
        """Take over the new state; or else keep the one from before the step."""
        if commit:
            assert self._result is not None
            self._before, self.state = self.state, self._result.state
            self._forget(self._frozen)
        if self._lent is not None and self._buffer is not None:
            self._spare = self._unused(self._lent[0], self._buffer) if commit else self._buffer
        self._lent = self._buffer = None

    def _unused(self, old: Tensor, buffer: Tensor) -> Tensor:
        """Return the one of two vectors that the new state does not hold."""
        lent = self.method.lend(self.state)
        return old if lent is not None and lent[0].data_ptr() == buffer.data_ptr() else buffer

    def undo(self) -> None:
        """Go back to the state from before the last step that counted; only until the next one begins."""
        if self._before is not None:
            self.state, self._before = self._before, None
            self._spare = None  # it may be the residual again

    @property
    def can_deliver(self) -> bool:
        """Whether the sum is there, to be written in the place of the gradients."""
        return self._replaces and self._result is not None and self._result.total is not None

    def fits(self, factor: float, scaled: bool) -> bool:
        """Whether the sum times a factor stays within the range of the gradients' dtypes.

        Args:
            factor: The factor.
            scaled: It makes the sum larger; otherwise only narrower dtypes are in doubt.
        """
        assert self._result is not None
        whole: Tensor = self._result.total
        doubtful = [
            (self.ops.absmax(whole[self._spans[position]]) * factor).to(grad.dtype)
            for position, grad in self._grads.items()
            if scaled or grad.dtype != whole.dtype
        ]
        return all(torch.stack(doubtful).isfinite().tolist()) if doubtful else True

    def deliver(self, factor: float) -> None:
        """Write the sum over the ranks, times a factor, in the place of the gradients, and drop it."""
        assert self._result is not None
        pieces = [(self._spans[position], grad) for position, grad in self._grads.items()]
        self.ops.deliver(self._result.total, pieces, factor)
        self._result = self._result._replace(total=None)

    def total(self, position: int) -> Tensor:
        """The sum over the ranks of the gradient at this place."""
        assert self._result is not None
        total: Tensor = self._result.total[self._spans[position]]
        return total.view(self.bucket.shapes[position])

    def close(self) -> None:
        """End the step; if it has not been settled, as if it had not been."""
        self.settle(commit=False)
        self._reset()

    def drain(self) -> None:
        """Finish an exchange whose result nobody wants, so that its collectives do not meet those of the next step."""
        with suppress(CompressionError):
            self.start()
            while self.busy and (self._pending is not None or self._held is not None):
                self.wait()

    def halt(self) -> None:
        """Wait for the collective under way and go no further."""
        if self._pending is not None:
            self._pending.wait()

    def forget(self, positions: Iterable[int]) -> None:
        """Clear what is kept of some gradients, as far as it is kept coordinate by coordinate; between steps."""
        self._before = None
        self._forget(positions)

    def _forget(self, positions: Iterable[int]) -> None:
        vectors = [leaf for leaf in flatten(self.state).values() if isinstance(leaf, Tensor)]
        for position in positions:
            for vector in vectors:
                if vector.shape == (self.bucket.numel,):
                    vector[self._spans[position]] = 0

    def read(self) -> dict[str, Any]:
        """Return the state as named leaves: copies in numpy, and ints. During a step, those from before it."""
        return {
            path: leaf.to("cpu", copy=True).numpy() if isinstance(leaf, Tensor) else leaf
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
        self.state, self._before = unflatten(self.state, new), None
