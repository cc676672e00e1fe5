"""The course of a step: gradients come in, buckets leave, results go out."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hvd_compress.stats import Meter
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
        key: Of its parameter.
        grad: The gradient itself.
        parameter: Whose it is; None in a direct call.
        own: Whether it is what its parameter has for a gradient.
    """

    number: int
    key: int
    grad: Tensor
    parameter: Tensor | None
    own: bool

    @property
    def frozen(self) -> bool:
        """Whether its parameter is not trained, so that the result is zero."""
        return self.parameter is not None and not self.parameter.requires_grad

    @property
    def replaced(self) -> bool:
        """Whether its parameter has another gradient by now."""
        return self.own and self.parameter is not None and self.parameter.grad is not self.grad


class Place(NamedTuple):
    """Where a gradient goes.

    Attributes:
        name: Of the parameter.
        slot: The bucket.
        position: The place in the bucket.
    """

    name: str
    slot: Slot
    position: int


class Course:
    """One step after another. A step begins with the first `add` and ends when all results have been taken.

    A bucket gives its result out as soon as it is there. Should another bucket's exchange go wrong after that, or
    another gradient not be finite, it stays as it is.

    Args:
        carriers: What Horovod reduces in the place of the gradients.
        meter: Counts bytes and time.
        loss_scale: By which the gradients are too large.
        replaces: The results are written to the gradients, and carriers are reduced in place.
        lock: Held by the caller of every method but `rest`; given up while waiting.

    Attributes:
        slots: The buckets.
        places: Where each gradient goes, by the keys of their parameters.
        expected: How many gradients come in a backward pass.
        waiting: How many gradients have come in this step, 0 between steps.
        finite: Whether the step counts, as far as is known: no rank has a gradient, and none will have a result, that
            is not finite.
        held: The gradients of a step that waits to be released; None in all others.
        changed: Whether somebody else has written to a gradient of this step since it came.
    """

    def __init__(
        self, carriers: Carriers, meter: Meter, loss_scale: LossScale, replaces: bool, lock: threading.Condition
    ) -> None:
        self.slots: Sequence[Slot] = ()
        self.places: Mapping[int, Place] = {}
        self.expected = 0
        self._carriers = carriers
        self._meter = meter
        self._loss_scale = loss_scale
        self._replaces = replaces
        self._lock = lock
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self.waiting = self._taken = 0
        self.finite = True
        self.held: list[Entry] | None = None
        self.changed = False
        self._scale = 1.0
        self._factor: float | None = None
        self._spoilt: set[int] = set()
        self._running: deque[Slot] = deque()
        self._entries: list[Entry] = []
        self._versions: list[int] = []
        self._filling: defaultdict[Slot, list[Entry]] = defaultdict(list)
        self._carriers.reset()

    def begin(self) -> None:
        """Ask for the loss scale, which holds for a whole step.

        Raises:
            SpecError: If it is not a positive number.
        """
        self._scale = self._loss_scale.read()

    def hold(self) -> None:
        """Keep the gradients of this step until `release`: what they are exchanged with is not known yet."""
        self.held = []

    def add(self, key: int, grad: Tensor, parameter: Tensor | None, call: Hashable) -> tuple[Tensor, Entry]:
        """Take in a gradient.

        Returns:
            The carrier for Horovod to allreduce, and what to `take` the result with.
        """
        lap = self._meter.begin()
        own = parameter is not None and parameter.grad is grad
        entry = Entry(self.waiting, key, grad, parameter, own)
        self._entries.append(entry)
        self._versions.append(grad._version)
        peak = self._put(entry) if self.held is None else self._keep(self.held, entry)
        carrier = self._carriers.give(peak, call)
        self._meter.gradient_bytes += grad.nbytes
        self._meter.bytes_sent += CARRIER_BYTES
        self.waiting += 1
        if self.waiting == self.expected and self._replaces and self.held is None:
            at_end_of_backward(self.rest)
        self._meter.encode += self._meter.lap(lap)
        return carrier, entry

    def _keep(self, held: list[Entry], entry: Entry) -> float | Tensor:
        held.append(entry)
        grad = entry.grad if self._scale == 1 else entry.grad / self._scale
        if not grad.is_cuda:
            return 0.0 if grad.isfinite().all() else math.nan
        return torch.linalg.vector_norm(grad.float(), ord=torch.inf) if grad.numel() else grad.new_zeros(())

    def release(self) -> None:
        """Let the gradients go that were held."""
        held, self.held = self.held or [], None
        for entry in held:
            self._put(entry)

    def _put(self, entry: Entry) -> float | Tensor:
        place = self.places.get(entry.key)
        if place is None or not entry.grad.numel():
            return entry.grad.new_zeros(()) if entry.grad.is_cuda else 0.0
        slot = place.slot
        self._filling[slot].append(entry)
        peak = slot.put(place.position, entry.grad, self._scale, entry.frozen)
        if self._running:
            self._push_on()
        if slot.busy:
            self._running.append(slot)
        return peak

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
        if slot.can_deliver:
            factor = self._carriers.first_factor() if self._factor is None else self._factor
            if math.isfinite(factor):
                self._deliver(slot, factor)

    def _deliver(self, slot: Slot, factor: float) -> None:
        self.finite = self.finite and slot.fits(factor * self._scale, scaled=self._scale != 1)
        entries = self._filling[slot]
        self._note_changes(entries)
        slot.deliver(factor * self._scale)
        for entry in entries:
            self._versions[entry.number] = entry.grad._version

    def _note_changes(self, entries: Sequence[Entry]) -> None:
        for entry in entries if not self.changed else ():
            if self._versions[entry.number] != entry.grad._version or entry.replaced:
                self.changed = True

    def rest(self) -> None:
        """Wait asleep for the carriers, at the end of a backward pass that has given all gradients.

        Horovod's own waiting takes a core. If nothing moves for long, another rank may first want something of this
        one: then do not wait here.
        """
        begin = moved = time.monotonic()
        before = -1
        with self._lock, self._meter.time("wait"):
            while self.waiting and not self._carriers.are_back():
                self._go_on()
                if before != (before := self._carriers.under_way):
                    moved = time.monotonic()
                elif time.monotonic() - moved > _PATIENCE:
                    break
                nap(begin, self._lock.wait)

    def _go_on(self) -> None:
        """Go on with all buckets without waiting."""
        for slot in self._running:
            with self._meter.time("decode"):
                self._look_at(slot)
        self._running = deque(slot for slot in self._running if slot.busy)

    def take(self, carrier: Tensor, entry: Entry) -> Tensor:
        """Give out a result; the first call of a step completes all exchanges.

        Raises:
            ExchangeError: If one of them went wrong.
        """
        if not self._taken:
            self._note_changes(self._entries)
            with self._meter.time("decode"):
                self._complete()
        self._taken += 1
        result, place = entry.grad, self.places.get(entry.key)
        if place is not None and result.numel():
            if not self._replaces:
                with self._meter.time("decode"):
                    result = self._computed(carrier, place, entry)
            elif entry.number in self._spoilt:
                result.fill_(math.nan)
            if entry.frozen:
                result.zero_()
        return result

    @property
    def completed(self) -> bool:
        """Whether a result has been taken."""
        return self._taken > 0

    @property
    def ended(self) -> bool:
        """Whether all results have been taken."""
        return self._taken == self.waiting

    def _complete(self) -> None:
        """Finish all exchanges, and write the results.

        No rank waits for one exchange alone, as another rank may wait for another one.
        """
        for slot in self.slots:
            slot.start()
        self._running = deque(slot for slot in self.slots if slot.busy)
        begin = time.monotonic()
        while self._unfinished():
            with self._meter.time("wait"):
                nap(begin, self._lock.wait)
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

    def _computed(self, carrier: Tensor, place: Place, entry: Entry) -> Tensor:
        """A result beside its gradient, in a direct call, whose carriers come one after another."""
        total, factor = place.slot.total(place.position), self._carriers.factor(carrier)
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
        for slot in self.slots if self.held is None else ():
            slot.halt() if lacking else slot.drain()
        self._carriers.settle()

    def forget(self) -> None:
        """Forget the step, and what of it Horovod may still have."""
        for slot in self.slots:
            slot.close()
        self._carriers.renew()
        self.reset()
