"""What a compressor is to one optimizer: its buckets and what they keep between steps."""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from hvd_compress import agreement
from hvd_compress.collectives import AllReduce, State
from hvd_compress.elastic import Membership
from hvd_compress.errors import (
    DisagreementError,
    ExchangeError,
    SpecError,
    StateError,
    UnknownParameterError,
    UnsupportedError,
)
from hvd_compress.group import Group
from hvd_compress.merging import Gradient, Merge, gradient, merged_sizes, pin, plan, start
from hvd_compress.methods.base import Method
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.redistribution import Kept, divisible, inherit
from hvd_compress.saved import SavedSession, fingerprint
from hvd_compress.spec import to_spec
from hvd_compress.state import flatten, roles
from hvd_compress.stats import Meter
from hvd_compress.torch import caller
from hvd_compress.torch.backward import at_end_of_backward, in_backward
from hvd_compress.torch.carriers import Carriers
from hvd_compress.torch.course import Course, Entry, Place
from hvd_compress.torch.driver import gather_bytes, launch
from hvd_compress.torch.handshake import PATIENCE, Handshake, place_of
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


def facts_of(members: Iterable[tuple[str, Tensor]]) -> list[Gradient]:
    """What the ranks must have in common of parameters, given with their names."""
    return [Gradient(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in members]


class Came(IntEnum):
    """How the gradient of a parameter came in the first step, on the rank where it came soonest."""

    NEVER = 0
    """Horovod reduces it in another way, as it is sparse."""
    LATE = 1
    """Only when Horovod looked for what was missing: the parameter was not used."""
    IN_BACKWARD = 2


class Session:
    """The exchange of the gradients of one optimizer.

    A step begins with the first `add` and ends with the last `take`. Horovod adds all gradients before it takes any.

    The first step, and the first one after a state was restored, is held: nothing is exchanged before all ranks are
    known to agree. The first step also shows which parameters have gradients, and so which buckets there are.

    Args:
        method: What compresses.
        merge: How gradients are put into buckets.
        members: What is reduced, in the order in which the model uses it.
        group: The ranks that take part.
        meter: Counts bytes and time.
        label: A name that is the same on all ranks: part of the names of its collectives.
        loss_scale: By which the gradients are too large.
        full: What Horovod makes of a 1 on each of so many ranks.
        lock: Held by the caller of every method; given up while waiting.
        replaces: The results are written to the gradients, and carriers are reduced in place.

    Attributes:
        steps: How many there have been.
        job: A number that the ranks have agreed on; 0 before that.
        changed: Whether gradients of the last step were changed by somebody else before they were reduced.

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
        lock: threading.Condition,
        replaces: bool = False,
    ) -> None:
        self.label = label
        self.group = group
        self.steps = self.job = self._series = 0
        self._membership = Membership(zlib.crc32(label.encode()))
        self._met: object = None
        self._full = full
        self._replaces = replaces
        self._meter = meter
        self._lock = lock
        self._carriers = Carriers(full(group.world.size), group.world.size, len(members))
        self._course = Course(self._carriers, meter, loss_scale, replaces, lock)
        self._incarnation = caller.incarnation()
        self._parameters = {key: weakref.ref(tensor) for key, _, tensor in members}
        self._lent: set[int] = set()
        self._threads: set[int] = set()
        self._gradients = [
            gradient(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), str(p.device)) for _, name, p in members
        ]
        self._facts = facts_of((name, tensor) for _, name, tensor in members)
        self._method, self._merge = method, merge
        self._slots: list[Slot] = []
        self._places: dict[int, Place] = {}
        self._tuner: Tuner | None = None
        self._next: Merge | None = None
        self._handshake: Handshake | None = None
        self._due = not agreement.elastic()
        self._counted = self._verified = self.changed = False
        self._seen: set[int] = set()
        self._early: dict[int, Came] = {}
        self._came: dict[int, Came] = {}
        self._fixed: Merge | None = None if merge == "auto" else merge
        if agreement.elastic() or not replaces:  # a newcomer in an elastic job knows nothing of the first step
            self._begin_with(dict.fromkeys(self._parameters, Came.IN_BACKWARD))

    @property
    def begun(self) -> bool:
        """Whether there are buckets, and so a state."""
        return bool(self._came)

    def _begin_with(self, came: Mapping[int, Came]) -> None:
        """Make the first buckets, and look for better ones from now on if new ones can take over all states."""
        self._came = dict(came)
        first = pin(start(self._sizes())) if self._fixed is None else self._fixed
        if agreement.elastic():  # a newcomer knows of no other partition than the first
            self._fixed = first
        self._lay_out(first)
        if self._replaces and self._fixed is None and all(map(divisible, self._kept(), map(roles, self.states()))):
            self._tuner = Tuner(self._sizes(), f"hvd_compress.{self.label}.search")

    def _sizes(self) -> list[int]:
        """The bytes of the gradients that ``merge`` counts for."""
        return merged_sizes([one for _, one in self._present(self._came)], self._method)

    def _present(self, came: Mapping[int, Came]) -> list[tuple[int, Gradient]]:
        """The gradients that are exchanged, with the keys of their parameters."""
        return [
            (key, one._replace(late=came[key] == Came.LATE))
            for key, one in zip(self._parameters, self._gradients, strict=True)
            if came[key] != Came.NEVER
        ]

    def _lay_out(self, partition: Merge) -> None:
        """Make new slots for the buckets of a partition."""
        self._partition = partition
        self._slots = []
        self._places = {}
        present = self._present(self._came)
        for planned in plan([one for _, one in present], self._method, partition):
            mine = [present[i] for i in planned.members]
            here, device = self._carriers.are_complete, torch.device(mine[0][1].device)
            slot = Slot(planned, device, self._prefix, self.group, self._meter, self._replaces, here)
            self._slots.append(slot)
            for position, (key, one) in enumerate(mine):
                self._places[key] = Place(one.name, slot, position)
        self._course.slots, self._course.places = self._slots, self._places
        self._course.expected = sum(self._came[key] == Came.IN_BACKWARD for key, _ in present)

    def _prefix(self) -> str:
        """Of the names of collectives: others after ranks that disagreed, which may have left some unanswered."""
        return f"hvd_compress.{self.label}.{self._series:x}"

    @property
    def waiting(self) -> int:
        """How many gradients have come in this step, 0 between steps."""
        return self._course.waiting

    def _change(self, partition: Merge) -> None:
        """Go on with another partition."""
        if partition == self._partition:
            return
        kept = self._kept()
        self._lay_out(partition)
        for slot, mine in zip(self._slots, self._kept(), strict=True):
            slot.write(inherit(mine, kept))

    def broken_off(self) -> bool:
        """Whether a step has begun of which Horovod, which remembers nothing of it, will not ask for the results.

        What another thread has added may only just be on its way to Horovod.
        """
        return self.waiting > 0 and threading.get_ident() in self._threads

    def add(
        self, key: int, grad: Tensor, call: Hashable = None, parameter: Tensor | None = None
    ) -> tuple[Tensor, Ticket]:
        """Take in a gradient.

        Args:
            key: Of the member.
            grad: Its gradient.
            call: Equal for those that Horovod gives back together.
            parameter: Whose it is, if it is a parameter's.

        Returns:
            The carrier for Horovod to allreduce, and the ticket to take the result with. What comes back tells how
            Horovod would have scaled the sum, and whether all ranks had a finite gradient.
        """
        self._check_place(key, grad)
        if not self.waiting:
            self._begin_step()
        self._threads.add(threading.get_ident())
        if not self.begun:
            self._early[key] = Came.IN_BACKWARD if in_backward() else Came.LATE
        self._seen.add(key)
        carrier, entry = self._course.add(key, grad, parameter, call)
        return carrier, Ticket(self, entry)

    def _begin_step(self) -> None:
        self._course.begin()
        if self._next is not None:
            self._change(self._next)
            self._next = None
        self._threads, self._seen = set(), set()
        self._early = dict.fromkeys(self._parameters, Came.NEVER)
        self._counted = self._verified = False
        if agreement.elastic() and self._met is not caller.incarnation():
            self.group = Group.of(self.group.process_set)
            self._carriers.resize(self._full(self.group.world.size), self.group.world.size)
            self._incarnation = caller.incarnation()
            self._course.hold()
        elif self._due or not self.begun:
            self._course.hold()
        if self._due:
            self._carriers.asking = True
            self._greet()
            at_end_of_backward(self.verify_soon)

    def _check_place(self, key: int, grad: Tensor) -> None:
        """Refuse a gradient that has no place, or has come in this step."""
        if key not in self._parameters or self._came.get(key) == Came.NEVER:
            what = "was not among those that the optimizer had" if key not in self._parameters else "was sparse"
            raise UnknownParameterError(
                f"a parameter of shape {tuple(grad.shape)} {what} in its first step: {caller.CURE}"
            )
        self._lent.discard(key)
        if self.waiting and key in self._seen:
            name = self._gradients[list(self._parameters).index(key)].name
            raise ExchangeError(f"the gradient of {name!r} came twice in one step: call optimizer.step() in between")

    def take(self, carrier: Tensor, ticket: Ticket) -> Tensor:
        """Give out a result; the first call of a step completes all exchanges, the last one ends the step.

        Raises:
            DisagreementError: If the ranks were not set up alike, or do not go on from the same saved state.
            ExchangeError: If an exchange went wrong.
            UnsupportedError: If a rank is missing.
        """
        try:
            if not self._course.completed:
                self._prepare(carrier, ticket.entry)
            result = self._course.take(carrier, ticket.entry)
        except UnsupportedError:
            self.abort()
            raise
        if self._course.ended:
            self._end()
        return result

    def _prepare(self, carrier: Tensor, entry: Entry) -> None:
        """Make sure that the step is right, now that all gradients have come and Horovod waits for results."""
        caller.check_not_in_scaler()
        asked = self._carriers.check(carrier, entry.number)
        if agreement.elastic():
            self._meet()
        elif asked and not self._verified:
            self._greet().wait(sleep=self._lock.wait)
            self._verify()
        if not self.begun:
            self._begin_with(self._came_anywhere())
        if self._course.held is not None:
            self._course.release()

    def _greet(self) -> Handshake:
        """Begin to verify that the ranks agree; a handshake left by a step that was given up is used."""
        if self._handshake is None:
            facts = agreement.describe(self._method, self._merge, self._facts, self.identity)
            # All ranks make direct calls in the same order, so they meet at the same place whatever the names.
            place = place_of(one.name for one in self._facts) if self._replaces else ""
            self._handshake = Handshake(facts, place, self.group, afresh=self._due)
        return self._handshake

    @property
    def identity(self) -> str:
        """Names the state, the same on all ranks that go on from the same step; empty for a new one."""
        return f"step {self.steps} of job {self.job:x}" if self.job else ""

    def verify_soon(self) -> None:
        """Verify that ranks agree, if the others come soon: they may legally come later."""
        with self._lock, self._meter.time("wait"):
            if self._handshake is not None and self._handshake.wait(PATIENCE, self._lock.wait):
                self._verify()

    def _verify(self) -> None:
        handshake, self._handshake = self._handshake, None
        assert handshake is not None
        try:
            self.job = handshake.verify()
            if handshake.all_afresh:
                self._series = self.job
        except DisagreementError:
            self._carriers.settle(PATIENCE)
            self._course.forget()
            raise
        self._due = self._carriers.asking = False
        self._verified = True

    def _came_anywhere(self) -> dict[int, Came]:
        """Ask the other ranks which gradients have come, and how."""
        mine = torch.tensor([self._early[key] for key in self._parameters], dtype=torch.int32, device="cpu")
        pending = launch(AllReduce(mine, "max"), f"hvd_compress.{self.label}.came", self.group)
        return dict(zip(self._parameters, map(Came, pending.wait(self._lock.wait).tolist()), strict=True))

    def _end(self) -> None:
        course = self._course
        course.end()
        self._counted = finite = course.finite
        self.changed = course.changed
        course.reset()
        self.steps += 1
        if finite and self._tuner is not None and (cuts := self._tuner.end_step(self.group)) is not None:
            self._next = pin(cuts)

    def discard(self) -> None:
        """Take the last step back, as its results were thrown away.

        Raises:
            UnsupportedError: If gradients of a step have come that have not been reduced.
        """
        if self.waiting:
            raise UnsupportedError(
                "compression.discard() takes back gradients that were reduced, but those of this step have not been:"
                " call optimizer.synchronize() first"
            )
        if self._counted:
            for slot in self._slots:
                slot.undo()
            self.steps -= 1
            self._due, self._counted = not agreement.elastic(), False

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
        formers = [former for former in formers if former.begun]
        if not formers:
            return
        known = {key: came for former in formers for key, came in former._came.items()}
        self._begin_with({key: known.get(key, Came.IN_BACKWARD) for key in self._parameters})
        self.steps, self.job = max(former.steps for former in formers), sum(former.job for former in formers)
        self._series = sum(former._series for former in formers)
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
        came = [int(self._came[key]) for key in self._parameters]
        shared = fingerprint(buckets, {slot.bucket.key: roles(slot.state) for slot in self._slots})
        return SavedSession(*self.group.world, self.steps, buckets, self._partition, search, self.job, shared, came)

    def restore(self, saved: SavedSession) -> None:
        """Take over states that have been checked, and their partition if any will do."""
        if saved.came is not None:
            self._begin_with(self._came_before(saved))
        if saved.merge is not None and saved.merge != self._partition:
            self._lay_out(saved.merge)
        self.steps, self.job = saved.steps, saved.job
        self._due, self._counted, self._next = not agreement.elastic(), False, None
        for slot in self._slots:
            slot.write(saved.buckets[slot.bucket.key])
        if self._fixed is not None:
            self._change(self._fixed)
        elif self._tuner is not None:
            self._tuner.resume(saved.search)
            if self._tuner.cuts is not None:
                self._change(pin(self._tuner.cuts))

    def _came_before(self, saved: SavedSession) -> dict[int, Came]:
        """How gradients came in the first step of a job that has saved.

        Raises:
            StateError: If that had others.
        """
        came = [Came.IN_BACKWARD] * len(self._parameters) if saved.came is None else list(map(Came, saved.came))
        if len(came) != len(self._parameters):
            raise StateError(
                f"the saved state is of {len(came)} parameters, but the optimizer has {len(self._parameters)}: restore"
                " with the model that was saved"
            )
        return dict(zip(self._parameters, came, strict=True))

    def _meet(self) -> None:
        """In an elastic job, find out at the first step after Horovod was started which ranks there are now.

        Raises:
            DisagreementError: If a newcomer is not set up as the others are.
        """
        if self._met is caller.incarnation():
            return
        meeting = self._membership.meet(
            self.group.world,
            self.steps,
            lambda data, name: gather_bytes(data, f"{name}.{place_of(one.name for one in self._facts)}", self.group),
            agreement.describe(self._method, self._merge, self._facts),
            self.by_bucket,
        )
        self._met = caller.incarnation()
        for slot in self._slots:
            slot.group = self.group
        if meeting is not None:
            self.job = meeting.job
            if meeting.leaves:
                self.restore(SavedSession(*self.group.world, meeting.steps, meeting.leaves, job=meeting.job))

    def by_bucket(self, saved: SavedSession | None = None) -> dict[str, Kept]:
        """The states of all buckets, by their keys; new ones for those of a saved state.

        Raises:
            StateError: If the session cannot go on with their partition.
        """
        if saved is None or saved.merge is None:
            kept = [one._replace(leaves=slot.read()) for one, slot in zip(self._kept(), self._slots, strict=True)]
            return {one.bucket.key: one for one in kept}
        present = [one for _, one in self._present(self._came_before(saved))]
        try:
            planned = plan(present, self._method, saved.merge)
        except SpecError as error:
            raise StateError(f"the saved buckets do not fit, the model has changed: {error}") from error
        states = [one.method.init(NumpyOps(), one.bucket, self.group.world.size) for one in planned]
        kept = [Kept(p.members, p.bucket, p.method, flatten(s)) for p, s in zip(planned, states, strict=True)]
        if self._fixed not in (None, saved.merge) and not all(map(divisible, kept, map(roles, states))):
            raise StateError(
                f"this state was saved with merge={saved.merge!r}, but merge is {self._fixed!r} now, and other buckets"
                f" cannot take over all that {to_spec(self._method)} keeps: take merge={saved.merge!r}"
            )
        return {one.bucket.key: one for one in kept}
