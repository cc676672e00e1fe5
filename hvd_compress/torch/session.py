"""What a compressor is to one optimizer: its buckets, their state, and the course of a step."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvd_compress.collectives import State
from hvd_compress.elastic import Membership
from hvd_compress.errors import ExchangeError, UnknownParameterError, UnsupportedError
from hvd_compress.group import Group
from hvd_compress.merging import Merge, gradient, plan
from hvd_compress.methods.base import Method
from hvd_compress.redistribution import Kept, inherit
from hvd_compress.saved import SavedSession
from hvd_compress.stats import Meter
from hvd_compress.torch import caller
from hvd_compress.torch.driver import gather_bytes
from hvd_compress.torch.presence import Presence
from hvd_compress.torch.scaling import LossScale
from hvd_compress.torch.slot import Slot


class Ticket(NamedTuple):
    """What ``compress`` leaves with Horovod for ``decompress``.

    Attributes:
        session: Where the gradient went.
        slot: Its bucket; None for a gradient without elements.
        position: Its place in the bucket.
        like: The gradient itself, for its shape and dtype.
        frozen: Its parameter is not trained, so the result is zero.
    """

    session: Session
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
    ) -> None:
        self.label = label
        self.group = group
        self.steps = 0
        self._membership = Membership(zlib.crc32(label.encode()))
        self._met: object = None
        self._full = full
        self._meter = meter
        self._loss_scale = loss_scale
        self._presence = Presence(full(group.world.size), group.world.size)
        self._incarnation = caller.incarnation()
        self._slots: list[Slot] = []
        self._places: dict[int, Place] = {}
        self._parameters = {key: weakref.ref(tensor) for key, _, tensor in members}
        self._lent: set[int] = set()
        gradients = [
            gradient(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), str(p.device)) for _, name, p in members
        ]
        for planned in plan(gradients, method, merge):
            mine = [members[i] for i in planned.members]
            slot = Slot(
                planned, mine[0].tensor.device, f"hvd_compress.{label}", group, meter, self._presence.is_complete
            )
            self._slots.append(slot)
            for position, (key, name, _) in enumerate(mine):
                self._places[key] = Place(name, slot, position)
        self._reset()

    def _reset(self) -> None:
        self.waiting = 0
        self._scale = 1.0
        self._presence.reset()
        self._factors: list[Tensor] = []
        self._peaks: list[Tensor] = []

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
        slot, position, carrier = None, 0, torch.ones(1, dtype=torch.float64, device=grad.device)
        if not self.waiting:
            self._scale = self._loss_scale.read()
        if grad.numel():
            slot, position = self._free_place(key, grad)
            with self._meter.time("encode"):
                peak = slot.put(position, grad, self._scale, frozen)
                carrier = (peak * 0 + 1).to(torch.float64).reshape(1)
                for other in self._slots:  # a later gradient is the chance to start an earlier bucket's second round
                    if other is not slot:
                        other.poll()
        self._meter.gradient_bytes += grad.numel() * grad.element_size()
        self._meter.bytes_sent += carrier.element_size()
        self.waiting += 1
        self._presence.add(carrier)
        return carrier, Ticket(self, slot, position, grad, frozen)

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
        with self._meter.time("decode"):
            if not self._factors:
                self._check(carrier)
                self._complete()
            factor = carrier.reshape(()) / self.group.world.size
            self._factors.append(factor)
            result = ticket.like
            if ticket.frozen:
                result = torch.zeros_like(ticket.like)
            elif ticket.slot is not None:
                result = self._result(ticket.slot.total(ticket.position), factor, ticket.like.dtype)
            if len(self._factors) == self.waiting:
                self._end()
        return result

    def _result(self, total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """Scale a sum as Horovod and the loss scaler would have; note where that may have overflown."""
        result = total.mul_(factor * self._scale).to(dtype)
        if dtype != total.dtype or self._scale != 1:
            self._peaks.append(torch.linalg.vector_norm(result, ord=torch.inf).double())
        return result

    def _check(self, carrier: Tensor) -> None:
        """Look for a step that cannot be right, and for ranks that have left, which gathering would not survive.

        What is on its way is brought to its end, as the next step will use the same names.
        """
        try:
            caller.check_not_in_scaler()
            self._presence.check(carrier)
        except UnsupportedError:
            self.abort()
            raise

    def _complete(self) -> None:
        """Finish all exchanges, round by round, so that the second rounds of the buckets overlap too."""
        for slot in self._slots:
            slot.start()
        while busy := [slot for slot in self._slots if slot.busy]:
            for slot in busy:
                slot.wait()
        for slot in self._slots:
            if slot.error is not None:
                raise slot.error

    def _end(self) -> None:
        """Take over the new states, unless some rank had a gradient, or all have a result, that is not finite."""
        finite = bool(torch.stack([*self._factors, *self._peaks]).isfinite().all())
        for slot in self._slots:
            slot.close(commit=finite)
        self._reset()
        self.steps += 1
        self._meter.steps += 1

    def abort(self) -> None:
        """Give up a step that has begun: drop what has come and keep the states of before.

        The other ranks give up too, or wait for this one, so what has begun is brought to its end, unless a rank is
        missing or Horovod was started anew in between.
        """
        if self._incarnation is caller.incarnation():
            lacking = self._presence.lacking
            self._presence.assume()
            for slot in self._slots:
                slot.settle() if lacking else slot.drain()
            self._presence.settle()
        for slot in self._slots:
            slot.close(commit=False)
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
        return [Kept(keys[slot], slot.bucket, slot.method, slot.read()) for slot in self._slots]

    def saved(self) -> SavedSession:
        """The states of all buckets, as copies."""
        return SavedSession(*self.group.world, self.steps, {slot.bucket.key: slot.read() for slot in self._slots})

    def restore(self, saved: SavedSession) -> None:
        """Take over states that have been checked."""
        self.steps = saved.steps
        for slot in self._slots:
            slot.write(saved.buckets[slot.bucket.key])

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
        self._presence.resize(self._full(group.world.size), group.world.size)
        for slot in self._slots:
            slot.group = group
        if meeting is not None and meeting.leaves:
            self.restore(SavedSession(*group.world, meeting.steps, meeting.leaves))

    def by_bucket(self) -> dict[str, Kept]:
        """The states of all buckets, by their keys."""
        return {slot.bucket.key: kept for slot, kept in zip(self._slots, self._kept(), strict=True)}
