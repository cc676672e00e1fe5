"""The course of a step: gradients come in, buckets leave, results go out."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hvd_compress.stats import Meter
from hvd_compress.torch import caller
from hvd_compress.torch.backward import at_end_of_backward
from hvd_compress.torch.carriers import CARRIER_BYTES, Carriers
from hvd_compress.torch.driver import nap
from hvd_compress.torch.scaling import LossScale
from hvd_compress.torch.slot import Slot

_LOOKS = 4
"""How many exchanges under way are looked at for each gradient."""

_PATIENCE = 5.0
"""Seconds in which a carrier comes back, if no rank waits for something else."""


class Entry(NamedTuple):
    """A gradient of this step.

    Attributes:
        number: Which one it is, from 0.
        slot: Its bucket; None for a gradient without elements.
        position: Its place in the bucket.
        grad: The gradient itself.
        frozen: Its parameter is not trained, so the result is zero.
    """

    number: int
    slot: Slot | None
    position: int
    grad: Tensor
    frozen: bool


class Course:
    """One step after another. A step begins with the first `add` and ends when all results have been taken.

    A bucket that keeps its gradients for the case that the step does not count gives its result out as soon as that is
    known. Should another bucket's exchange go wrong after that, it stays as it is.

    Args:
        carriers: What Horovod reduces in the place of the gradients.
        meter: Counts bytes and time.
        loss_scale: By which the gradients are too large.
        members: How many gradients a step has, if all come.
        replaces: The results take the place of the gradients, and their memory, which is free from `add` on; carriers
            are reduced in place.

    Attributes:
        slots: The buckets.
        waiting: How many gradients have come in this step, 0 between steps.
        finite: Whether the step counts, as far as is known: no rank has a gradient, and none will have a result, that
            is not finite.
    """

    def __init__(self, carriers: Carriers, meter: Meter, loss_scale: LossScale, members: int, replaces: bool) -> None:
        self.slots: Sequence[Slot] = ()
        self._carriers = carriers
        self._meter = meter
        self._loss_scale = loss_scale
        self._members = members
        self._replaces = replaces
        self._rests = replaces
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self.waiting = self._taken = 0
        self.finite = True
        self._scale = 1.0
        self._factor: float | None = None
        self._spoilt: set[int] = set()
        self._certain = False  # that the step counts
        self._running: deque[Slot] = deque()
        self._carriers.reset()

    def add(self, slot: Slot | None, position: int, grad: Tensor, frozen: bool) -> tuple[Tensor, Entry]:
        """Take in a gradient.

        Returns:
            The carrier for Horovod to allreduce, and what to `take` the result with.
        """
        lap = self._meter.begin()
        peak: float | Tensor = grad.new_zeros(()) if grad.is_cuda else 0.0
        if not self.waiting:
            self._scale = self._loss_scale.read()
        if slot is not None:
            peak = slot.put(position, grad, self._scale, frozen)
            if self._running:
                self._push_on()
            if slot.busy:
                self._running.append(slot)
        carrier, entry = self._carriers.give(peak), Entry(self.waiting, slot, position, grad, frozen)
        self._meter.gradient_bytes += grad.nbytes
        self._meter.bytes_sent += CARRIER_BYTES
        self.waiting += 1
        if self.waiting == self._members and self._rests:
            at_end_of_backward(self._rest)
        self._meter.encode += self._meter.lap(lap)
        return carrier, entry

    def _push_on(self) -> None:
        """Start the second rounds of buckets whose first has ended. Look at a few, the oldest."""
        for _ in range(min(len(self._running), _LOOKS)):
            slot = self._running.popleft()
            self._look_at(slot)
            if slot.busy:
                self._running.append(slot)

    def _look_at(self, slot: Slot) -> None:
        """Go on with a bucket without waiting; give its result out if nothing speaks against it."""
        slot.poll()
        if not slot.can_deliver:
            return
        factor = self._carriers.first_factor() if self._factor is None else self._factor
        if not slot.lent and math.isfinite(factor):
            self._deliver(slot, factor)
        elif self._certain:
            slot.settle(commit=True)
            slot.deliver(factor)

    def _deliver(self, slot: Slot, factor: float) -> None:
        self.finite = self.finite and slot.fits(factor * self._scale, scaled=self._scale != 1)
        slot.deliver(factor * self._scale)

    def _rest(self) -> None:
        """Wait asleep for the carriers, at the end of a backward pass that has given all gradients.

        Horovod's own waiting takes a core. If nothing moves for long, another rank may first want something of this
        one: then never wait here again.
        """
        begin = moved = time.monotonic()
        before = -1
        with self._meter.time("wait"):
            while not self._carriers.are_back():
                self._go_on()
                if before != (before := self._carriers.under_way):
                    moved = time.monotonic()
                elif time.monotonic() - moved > _PATIENCE:
                    self._rests = False
                    break
                nap(begin)

    def _go_on(self) -> None:
        """Go on with all buckets without waiting.

        Those whose sum would have to wait for the carriers come after these: it would take memory beside the residual.
        """
        for slot in [slot for slot in self._running if not slot.lent or self._factor is not None]:
            with self._meter.time("decode"):
                self._look_at(slot)
        self._running = deque(slot for slot in self._running if slot.busy)

    def take(self, carrier: Tensor, entry: Entry) -> Tensor:
        """Give out a result; the first call of a step completes all exchanges.

        Raises:
            ExchangeError: If one of them went wrong.
            UnsupportedError: If a rank is missing.
        """
        if not self._taken:
            self._check(carrier)
            with self._meter.time("decode"):
                self._complete()
        self._taken += 1
        result = entry.grad
        if entry.slot is not None:
            if not self._replaces:
                with self._meter.time("decode"):
                    result = self._computed(carrier, entry.slot, entry)
            elif entry.number in self._spoilt:
                result.fill_(math.nan)
            if entry.frozen:
                result.zero_()
        return result

    @property
    def ended(self) -> bool:
        """Whether all results have been taken."""
        return self._taken == self.waiting

    def _check(self, carrier: Tensor) -> None:
        """Look for a step that cannot be right, and for ranks that have left, which gathering would not survive."""
        caller.check_not_in_scaler()
        self._carriers.check(carrier)

    def _complete(self) -> None:
        """Finish all exchanges, and write the results.

        No rank waits for one exchange alone, as another rank may wait for another one.
        """
        for slot in self.slots:
            slot.start()
        self._running = deque(slot for slot in self.slots if slot.busy)
        self._carriers.look_again()
        begin = time.monotonic()
        while self._unfinished():
            with self._meter.time("wait"):
                nap(begin)
        for slot in self.slots:
            if slot.error is not None:
                raise slot.error
        if self._replaces:
            self._settle()

    def _unfinished(self) -> bool:
        """Go on as far as possible without waiting; tell whether that is not the end."""
        if self._replaces and self._factor is None and self._carriers.are_back():
            self._judge()
        self._go_on()
        return bool(self._running) or (self._replaces and self._factor is None)

    def _judge(self) -> None:
        """Read all carriers."""
        factors = self._carriers.factors()
        self._spoilt = {number for number, factor in enumerate(factors) if not math.isfinite(factor)}
        self._factor = next((factor for factor in factors if math.isfinite(factor)), math.nan)
        self.finite = self.finite and not self._spoilt
        self._certain = self.finite and self._scale == 1 and not any(slot.narrow for slot in self.slots)
        for slot in self.slots:
            self._look_at(slot)

    def _settle(self) -> None:
        """Take over the new states if the step counts, and write the results that have not been."""
        assert self._factor is not None
        ready = [slot for slot in self.slots if slot.can_deliver]
        factor = self._factor * self._scale
        self.finite = self.finite and all(slot.fits(factor, scaled=self._scale != 1) for slot in ready)
        for slot in self.slots:
            slot.settle(commit=self.finite)
        for slot in ready:
            slot.deliver(factor)

    def _computed(self, carrier: Tensor, slot: Slot, entry: Entry) -> Tensor:
        """A result beside its gradient, in a direct call, whose carriers come one after another."""
        total, factor = slot.total(entry.position), self._carriers.factor(carrier)
        result = torch.mul(total, factor * self._scale).to(entry.grad.dtype)
        doubtful = result.dtype != total.dtype or self._scale != 1
        self.finite = self.finite and math.isfinite(factor) and not (doubtful and not result.isfinite().all())
        return result

    def end(self) -> None:
        """Close the step."""
        for slot in self.slots:
            if not self._replaces:
                slot.settle(commit=self.finite)
            slot.close()
        self._meter.steps += 1

    def abort(self) -> None:
        """Give up a step that has begun: drop what has come and keep the states of before.

        The other ranks give up too, or wait for this one, so what has begun is brought to its end, unless a rank is
        missing.
        """
        lacking = self._carriers.lacking
        self._carriers.assume()
        for slot in self.slots:
            slot.halt() if lacking else slot.drain()
        self._carriers.settle()

    def forget(self) -> None:
        """Forget the step, and what of it Horovod may still have."""
        for slot in self.slots:
            slot.close()
        self._carriers.renew()
        self.reset()
