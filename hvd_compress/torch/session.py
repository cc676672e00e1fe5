"""What a compressor is to one optimizer: its buckets and what they keep between steps."""

from __future__ import annotations

import weakref
import zlib
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
from hvd_compress.torch.carriers import Carriers
from hvd_compress.torch.course import Course, Entry
from hvd_compress.torch.driver import gather_bytes
from hvd_compress.torch.scaling import LossScale
from hvd_compress.torch.slot import Slot
from hvd_compress.torch.tuner import Tuner


class Ticket(NamedTuple):
    """What ``compress`` leaves with Horovod for ``decompress``.

    Attributes:
        session: Where the gradient went.
        entry: Which gradient it is.
    """

    session: Session
    entry: Entry


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
        self._carriers = Carriers(full(group.world.size), group.world.size, len(members))
        self._course = Course(self._carriers, meter, loss_scale, len(members), replaces)
        self._incarnation = caller.incarnation()
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
        self._course.slots = self._slots

    @property
    def waiting(self) -> int:
        """How many gradients have come in this step, 0 between steps."""
        return self._course.waiting

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
        slot, position = self._free_place(key, grad) if grad.numel() else (None, 0)
        carrier, entry = self._course.add(slot, position, grad, frozen)
        return carrier, Ticket(self, entry)

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
        try:
            result = self._course.take(carrier, ticket.entry)
        except UnsupportedError:
            self.abort()
            raise
        if self._course.ended:
            self._end()
        return result

    def _end(self) -> None:
        course = self._course
        course.end()
        finite = course.finite
        course.reset()
        self.steps += 1
        if finite and self._tuner is not None and (cuts := self._tuner.end_step(self.group)) is not None:
            self._change(pin(cuts))

    def abort(self) -> None:
        """Give up a step that has begun: drop what has come and keep the states of before."""
        if self._incarnation is caller.incarnation():
            self._course.abort()
        self._course.forget()

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
