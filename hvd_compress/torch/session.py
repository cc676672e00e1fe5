"""What a compressor is to one optimizer: its buckets, their state, and the course of a step."""

from __future__ import annotations

import math
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvd_compress import agreement
from hvd_compress.collectives import State
from hvd_compress.elastic import Membership
from hvd_compress.errors import ExchangeError, SpecError, StateError, UnknownParameterError, UnsupportedError
from hvd_compress.group import Group
from hvd_compress.merging import Merge, gradient, merged_sizes, pin, plan, start
from hvd_compress.methods.base import Method
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.redistribution import Kept, divisible, inherit
from hvd_compress.saved import SavedSession
from hvd_compress.spec import to_spec
from hvd_compress.state import flatten, roles
from hvd_compress.stats import Meter
from hvd_compress.torch import caller
from hvd_compress.torch.backward import at_end_of_backward
from hvd_compress.torch.carriers import CARRIER_BYTES, Carriers
from hvd_compress.torch.driver import NAP, gather_bytes
from hvd_compress.torch.scaling import LossScale
from hvd_compress.torch.slot import Slot
from hvd_compress.torch.tuner import Tuner

_LOOKS = 4
"""How many exchanges under way are looked at for each gradient."""

_PATIENCE = 5.0
"""Seconds in which a carrier comes back, if no rank waits for something else."""


class Ticket(NamedTuple):
    """What ``compress`` leaves with Horovod for ``decompress``.

    Attributes:
        session: Where the gradient went.
        number: Which one of the step it is.
        slot: Its bucket; None for a gradient without elements.
        position: Its place in the bucket.
        like: The gradient itself, for its shape and dtype.
        frozen: Its parameter is not trained, so the result is zero.
    """

    session: Session
    number: int
    slot: Slot | None
    position: int
    like: Tensor
    frozen: bool


class Member(NamedTuple):
    """A tensor that a session reduces in each step.

    Attributes:
        key: Tells it from the others.
        name: Of the parameter.
        tensor: The parameter, or one like it.
    """

    key: int
    name: str
    tensor: Tensor


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


class Session:
    """The exchange of the gradients of one optimizer.

    A step begins with the first `add` and ends with the last `take`. Horovod adds all gradients before it takes any.

    Args:
        method: What compresses.
        merge: How gradients are put into buckets.
        members: What is reduced, in the order in which the model uses it.
        group: The ranks that take part.
        meter: Counts bytes and time.
        label: A name that is the same on all ranks: part of the names of its collectives.
        loss_scale: By which the gradients are too large.
        full: What Horovod makes of a 1 on each of so many ranks.
        replaces: The results take the place of the gradients, and their memory, which is free from `add` on; carriers
            are reduced in place.

    Attributes:
        waiting: How many gradients have come in this step, 0 between steps.
        steps: How many there have been.

    Raises:
        GradientError: If a parameter's dtype cannot be compressed.
    """

    def __init__(
        self,
        method: Method,
        merge: Merge,
        members: Sequence[Member],
        group: Group,
        meter: Meter,
        label: str,
        loss_scale: LossScale,
        full: Callable[[int], float],
        replaces: bool = False,
    ) -> None:
        self.label = label
        self.group = group
        self.steps = 0
        self._membership = Membership(zlib.crc32(label.encode()))
        self._met: object = None
        self._full = full
        self._replaces = replaces
        self._meter = meter
        self._loss_scale = loss_scale
        self._carriers = Carriers(full(group.world.size), group.world.size, len(members))
        self._incarnation = caller.incarnation()
        self._restful = replaces
        self._parameters = {key: weakref.ref(tensor) for key, _, tensor in members}
        self._lent: set[int] = set()
        self._gradients = [
            gradient(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), str(p.device)) for _, name, p in members
        ]
        self._method = method
        first = pin(start(merged_sizes(self._gradients, method))) if merge == "auto" else merge
        # A newcomer in an elastic job knows of no other partition than the first.
        self._fixed = None if merge == "auto" and not agreement.elastic() else first
        self._tuner: Tuner | None = None
        self._lay_out(first)
        self._reset()

    def _lay_out(self, partition: Merge) -> None:
        """Make new slots for the buckets of a partition."""
        self._partition = partition
        self._slots: list[Slot] = []
        self._places: dict[int, Place] = {}
        keys = list(self._parameters)
        for planned in plan(self._gradients, self._method, partition):
            mine = [self._gradients[i] for i in planned.members]
            prefix, device = f"hvd_compress.{self.label}", torch.device(mine[0].device)
            slot = Slot(planned, device, prefix, self.group, self._meter, self._replaces, self._carriers.are_complete)
            self._slots.append(slot)
            for position, i in enumerate(planned.members):
                self._places[keys[i]] = Place(self._gradients[i].name, slot, position)

    def search(self) -> None:
        """Look for the best partition from now on, if any will do and new buckets can take over all states."""
        if self._fixed is None and all(map(divisible, self._kept(), map(roles, self.states()))):
            self._tuner = Tuner(merged_sizes(self._gradients, self._method), f"hvd_compress.{self.label}.search")

    def _change(self, partition: Merge) -> None:
        """Go on with another partition."""
        if partition == self._partition:
            return
        kept = self._kept()
        self._lay_out(partition)
        for slot, mine in zip(self._slots, self._kept(), strict=True):
            slot.write(inherit(mine, kept))

    def _reset(self) -> None:
        self.waiting = self._taken = 0
        self._scale = 1.0
        self._factor: float | None = None
        self._finite = True
        self._spoilt: set[int] = set()
        self._running: deque[Slot] = deque()
        self._carriers.reset()

    def add(self, key: int, grad: Tensor, frozen: bool = False) -> tuple[Tensor, Ticket]:
        """Take in a gradient.

        Args:
            key: Of the member.
            grad: Its gradient.
            frozen: The parameter is not trained any more.

        Returns:
            The carrier for Horovod to allreduce, and the ticket to take the result with. The carrier holds 1, so what
            comes back tells how Horovod would have scaled the sum; it is nan where the gradient is not finite.
        """
        slot, position, peak = None, 0, grad.new_zeros(()) if grad.is_cuda else 0.0
        lap = self._meter.begin()
        if not self.waiting:
            self._scale = self._loss_scale.read()
        if size := grad.numel():
            slot, position = self._free_place(key, grad)
            peak = slot.put(position, grad, self._scale, frozen)
            if self._running:
                self._push_on()
            if slot.busy:
                self._running.append(slot)
        carrier, ticket = self._carriers.give(peak), Ticket(self, self.waiting, slot, position, grad, frozen)
        self._meter.gradient_bytes += size * grad.element_size()
        self._meter.bytes_sent += CARRIER_BYTES
        self.waiting += 1
        if self.waiting == len(self._parameters) and self._restful:
            at_end_of_backward(self._rest)
        self._meter.encode += self._meter.lap(lap)
        return carrier, ticket

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
            self._note_overflow(slot, factor)
            slot.deliver(factor * self._scale)
        elif self._factor is not None and self._finite and not self._may_overflow:
            slot.settle(commit=True)
            slot.deliver(factor)

    @property
    def _may_overflow(self) -> bool:
        """Whether results may leave the range of their dtype where sums do not."""
        return self._scale != 1 or any(slot.narrow for slot in self._slots)

    def _go_on(self) -> None:
        """Go on with all buckets without waiting.

        Those whose sum would have to wait for the carriers come after these: it would take memory beside the residual.
        """
        for slot in self._busy():
            if not slot.lent or self._factor is not None:
                self._look_at(slot)

    def _judge(self) -> None:
        """Read all carriers: the step does not count if some rank had a gradient that is not finite."""
        factors = self._carriers.factors()
        self._spoilt = {number for number, factor in enumerate(factors) if not math.isfinite(factor)}
        self._factor = next((factor for factor in factors if math.isfinite(factor)), math.nan)
        self._finite = self._finite and not self._spoilt
        for slot in self._slots:
            if not slot.busy:
                self._look_at(slot)

    def _rest(self) -> None:
        """Wait asleep for the carriers, at the end of a backward pass that has given all gradients.

        Horovod's own waiting takes a core. If nothing moves for long, another rank may first want something of this
        one: then never wait here again.
        """
        lap, moved, before = self._meter.begin(), time.monotonic(), -1
        while not self._carriers.are_back():
            self._go_on()
            if before != (before := self._carriers.under_way):
                moved = time.monotonic()
            elif time.monotonic() - moved > _PATIENCE:
                self._restful = False
                break
            self._nap()
        self._meter.decode += self._meter.lap(lap)

    def _busy(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.busy]

    def _nap(self) -> None:
        with self._meter.time("wait"):
            time.sleep(NAP)

    def _free_place(self, key: int, grad: Tensor) -> tuple[Slot, int]:
        """Where a gradient goes that has not come yet in this step."""
        if key not in self._places:
            raise UnknownParameterError(
                f"a parameter of shape {tuple(grad.shape)} was not among those that the optimizer had in its first"
                f" step: {caller.CURE}"
            )
        self._lent.discard(key)
        name, slot, position = self._places[key]
        if slot.holds(position):
            raise ExchangeError(f"the gradient of {name!r} came twice in one step: call optimizer.step() in between")
        return slot, position

    def take(self, carrier: Tensor, ticket: Ticket) -> Tensor:
        """Give out a result; the first call of a step completes all exchanges, the last one ends the step."""
        lap = self._meter.begin()
        if not self._taken:
            self._check(carrier)
            self._complete()
            if self._replaces:
                self._settle()
        self._taken += 1
        result = ticket.like
        if ticket.slot is not None:
            if not self._replaces:
                result = self._computed(carrier, ticket.slot, ticket)
            elif ticket.number in self._spoilt:
                result.fill_(math.nan)
            if ticket.frozen:
                result.zero_()
        if self._taken == self.waiting:
            self._end()
        self._meter.decode += self._meter.lap(lap)
        return result

    def _computed(self, carrier: Tensor, slot: Slot, ticket: Ticket) -> Tensor:
        """A result beside its gradient, in a direct call: Horovod gives its carrier only now."""
        total, factor = slot.total(ticket.position), self._carriers.factor(carrier)
        result = torch.mul(total, factor * self._scale).to(ticket.like.dtype)
        checked = result if result.dtype != total.dtype or self._scale != 1 else torch.tensor(factor)
        self._finite = self._finite and bool(checked.isfinite().all())
        return result

    def _settle(self) -> None:
        """Take over the new states if the step counts, and write all results that have not been."""
        ready = [slot for slot in self._slots if slot.can_deliver]
        assert self._factor is not None
        for slot in ready:
            self._note_overflow(slot, self._factor)
        for slot in self._slots:
            slot.settle(commit=self._finite)
        for slot in ready:
            slot.deliver(self._factor * self._scale)

    def _note_overflow(self, slot: Slot, factor: float) -> None:
        """Look whether results leave the range of their dtype, as the sums did not."""
        self._finite = self._finite and slot.fits(factor * self._scale, scaled=self._scale != 1)

    def _check(self, carrier: Tensor) -> None:
        """Look for a step that cannot be right, and for ranks that have left, which gathering would not survive.

        What is on its way is brought to its end, as the next step will use the same names.
        """
        try:
            caller.check_not_in_scaler()
            self._carriers.check(carrier)
        except UnsupportedError:
            self.abort()
            raise

    def _complete(self) -> None:
        """Finish all exchanges. No rank waits for one of them alone, as another rank may wait for another one."""
        for slot in self._slots:
            slot.start()
        self._carriers.look_again()
        while self._busy() or (self._replaces and self._factor is None):
            if self._replaces and self._factor is None and self._carriers.are_back():
                self._judge()
            self._go_on()
            self._nap()
        for slot in self._slots:
            if slot.error is not None:
                raise slot.error

    def _end(self) -> None:
        """Close the step."""
        for slot in self._slots:
            if not self._replaces:
                slot.settle(commit=self._finite)
            slot.close()
        finite = self._finite
        self._reset()
        self.steps += 1
        self._meter.steps += 1
        if finite and self._tuner is not None and (cuts := self._tuner.end_step(self.group)) is not None:
            self._change(pin(cuts))

    def abort(self) -> None:
        """Give up a step that has begun: drop what has come and keep the states of before.

        The other ranks give up too, or wait for this one, so what has begun is brought to its end, unless a rank is
        missing or Horovod was started anew in between.
        """
        if self._incarnation is caller.incarnation():
            lacking = self._carriers.lacking
            self._carriers.assume()
            for slot in self._slots:
                slot.halt() if lacking else slot.drain()
            self._carriers.settle()
        for slot in self._slots:
            slot.close()
        self._carriers.renew()
        self._reset()

    def states(self) -> list[State]:
        """The states of all buckets."""
        return [slot.state for slot in self._slots]

    def living(self) -> set[int]:
        """The keys of the parameters that still exist and that no other session has taken over."""
        return {key for key, parameter in self._parameters.items() if parameter() is not None} - self._lent

    def inherit(self, formers: Sequence[Session]) -> None:
        """Take over what former sessions have kept of the same parameters; of others they keep it."""
        kept = [one for former in formers for one in former._kept()]
        if self._fixed is None and len(formers) == 1 and formers[0]._parameters.keys() == self._parameters.keys():
            self._tuner = formers[0]._tuner
            self._lay_out(formers[0]._partition)
        for slot, mine in zip(self._slots, self._kept(), strict=True):
            slot.write(inherit(mine, kept))
        for former in formers:
            former._lend(self.living())

    def _lend(self, keys: set[int]) -> None:
        """Forget what another session has taken over."""
        for key in keys & self._parameters.keys():
            self._lent.add(key)
            if key in self._places:
                self._places[key].slot.forget([self._places[key].position])

    def _kept(self) -> list[Kept]:
        """The states of all buckets, with the keys of their parameters; None for those that are no more."""
        living = self.living()
        keys: dict[Slot, list[int | None]] = {slot: [] for slot in self._slots}
        for key, place in self._places.items():
            keys[place.slot].append(key if key in living else None)
        return [Kept(keys[slot], slot.bucket, slot.method, flatten(slot.state)) for slot in self._slots]

    def saved(self) -> SavedSession:
        """The states of all buckets, as copies."""
        buckets = {slot.bucket.key: slot.read() for slot in self._slots}
        search = self._tuner.timings if self._tuner else []
        return SavedSession(*self.group.world, self.steps, buckets, self._partition, search)

    def restore(self, saved: SavedSession) -> None:
        """Take over states that have been checked, and their partition if any will do."""
        if saved.merge is not None and saved.merge != self._partition:
            self._lay_out(saved.merge)
        self.steps = saved.steps
        for slot in self._slots:
            slot.write(saved.buckets[slot.bucket.key])
        if self._fixed is not None:
            self._change(self._fixed)
        elif self._tuner is not None:
            self._tuner.resume(saved.search)
            if self._tuner.cuts is not None:
                self._change(pin(self._tuner.cuts))

    def meet(self, process_set: Any, facts: bytes) -> None:
        """In an elastic job, find out at the first step after Horovod was started which ranks there are now.

        Args:
            process_set: Horovod's.
            facts: What the ranks must have in common, from `agreement.describe`.

        Raises:
            DisagreementError: If a newcomer is not set up as the others are.
        """
        if self._met is caller.incarnation():
            return
        group = Group.of(process_set)
        meeting = self._membership.meet(
            group.world, self.steps, lambda data, name: gather_bytes(data, name, group), facts, self.by_bucket
        )
        self._met, self.group = caller.incarnation(), group
        self._incarnation = self._met
        self._carriers.resize(self._full(group.world.size), group.world.size)
        for slot in self._slots:
            slot.group = group
        if meeting is not None and meeting.leaves:
            self.restore(SavedSession(*group.world, meeting.steps, meeting.leaves))

    def by_bucket(self, merge: Merge | None = None) -> dict[str, Kept]:
        """The states of all buckets, by their keys; new ones for a partition that was saved.

        Raises:
            StateError: If the session cannot go on with such a partition.
        """
        if merge is None:
            kept = [one._replace(leaves=slot.read()) for one, slot in zip(self._kept(), self._slots, strict=True)]
            return {one.bucket.key: one for one in kept}
        try:
            planned = plan(self._gradients, self._method, merge)
        except SpecError as error:
            raise StateError(f"the saved buckets do not fit, the model has changed: {error}") from error
        states = [one.method.init(NumpyOps(), one.bucket, self.group.world.size) for one in planned]
        kept = [Kept(p.members, p.bucket, p.method, flatten(s)) for p, s in zip(planned, states, strict=True)]
        if self._fixed not in (None, merge) and not all(map(divisible, kept, map(roles, states))):
            raise StateError(
                f"this state was saved with merge={merge!r}, but merge is {self._fixed!r} now, and other buckets cannot"
                f" take over all that {to_spec(self._method)} keeps: take merge={merge!r}"
            )
        return {one.bucket.key: one for one in kept}
