"""Reduces the gradients of one optimizer: its buckets, and what they keep between steps."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hvd_compress.bucketing import Merge, pin
from hvd_compress.checkpoint import agreement
from hvd_compress.checkpoint.elastic import Membership
from hvd_compress.checkpoint.resharding import Kept
from hvd_compress.checkpoint.state_dict import SavedSession, fingerprint
from hvd_compress.core.collectives import AllGather, AllReduce, State, World
from hvd_compress.core.state_tree import kinds
from hvd_compress.core.transport import Renewable
from hvd_compress.errors import DisagreementError, ExchangeError, UnsupportedError
from hvd_compress.stats import Meter
from hvd_compress.torch.autotune import Tuner
from hvd_compress.torch.backward import at_end_of_backward, in_backward
from hvd_compress.torch.bucket_state import BucketState
from hvd_compress.torch.buckets import Buckets, Came, Member, facts_of
from hvd_compress.torch.handshake import PATIENCE, Handshake, place_of
from hvd_compress.torch.loss_scale import LossScale
from hvd_compress.torch.step import Entry, Place, Step
from hvd_compress.torch.votes import Votes
from hvd_compress.torch.waiting import wait
from hvd_compress.wrappers.router import Router


class Ticket(NamedTuple):
    """What to take a result with.

    Attributes:
        reducer: Where the gradient went.
        step: When.
        entry: Which gradient it is.
    """

    reducer: Reducer
    step: Step
    entry: Entry


class Common(NamedTuple):
    """What the reducers of a compressor have in common.

    Attributes:
        method: What compresses.
        merge: How gradients are put into buckets.
        meter: Counts bytes and time.
        loss_scale: By which the gradients are too large.
        lock: Held by the caller of every method; given up while waiting.
        cure: What to do after parameters were added to an optimizer, for messages.
    """

    method: Router
    merge: Merge
    meter: Meter
    loss_scale: LossScale
    lock: threading.Condition
    cure: str


class Reducer:
    """Reduces the gradients of one optimizer.

    A step begins with the first `add` and ends with the last `take`. All gradients are added before any is taken.

    The first step, and the first one after a state was restored, is held: nothing is exchanged before all ranks are
    known to agree. The first step also shows which parameters have gradients, and so which buckets there are.

    Args:
        common: Of all reducers of the compressor.
        members: What is reduced, in the order in which the model uses it.
        transport: Performs the collectives.
        ballot: Makes the votes of a step of these ranks; told whether this rank wants to verify that all agree.
        label: A name that is the same on all ranks: part of the names of its collectives.
        replaces: The results are written to the gradients, and votes are reduced in place.
        complete: Each step has the gradients of all members.

    Attributes:
        transport: Performs the collectives; another one after the ranks of an elastic job have changed.
        steps: How many there have been.
        job: A number that the ranks have agreed on; 0 before that.
        changed: Whether gradients of the last step were changed by somebody else before they were reduced.

    Raises:
        GradientError: If a parameter's dtype cannot be compressed.
    """

    def __init__(
        self,
        common: Common,
        members: Sequence[Member],
        transport: Renewable,
        ballot: Callable[[World, bool], Votes],
        label: str,
        replaces: bool = False,
        complete: bool = False,
    ) -> None:
        self.label = label
        self.transport = transport
        self.steps = self.job = self._series = 0
        self._membership = Membership(zlib.crc32(label.encode()))
        self._met: object = None
        self._ballot = ballot
        self._replaces = replaces
        self._method, self._merge, self._meter, self._loss_scale, self._lock, self._cure = common
        self._step: Step | None = None
        self._epoch = transport.epoch
        self._threads: set[int] = set()
        self._facts = facts_of((name, tensor) for _, name, tensor in members)
        self._buckets = Buckets(self._method, self._merge, members, self.world.size)
        self._tuner: Tuner | None = None
        self._next: Merge | None = None
        self._handshake: Handshake | None = None
        self._due = not agreement.elastic()
        self._counted = self._verified = self.changed = False
        self._seen: set[int] = set()
        self._early: dict[int, Came] = {}
        # A newcomer in an elastic job knows nothing of the first step.
        if agreement.elastic() or not replaces or complete:
            self._buckets.begin()
            if complete:
                self._tune()

    def _tune(self) -> None:
        """Look for better buckets from now on, if new ones can take over all states."""
        if self._replaces and self._buckets.fixed is None and self._buckets.divisible():
            self._tuner = Tuner(self._buckets.sizes(), f"hvd_compress.{self.label}.search")

    @property
    def begun(self) -> bool:
        """Whether there are buckets, and so a state."""
        return self._buckets.begun

    @property
    def world(self) -> World:
        """The ranks that take part."""
        return self.transport.world

    @property
    def buckets(self) -> Sequence[BucketState]:
        """All buckets, with their states."""
        return self._buckets.layout.buckets

    @property
    def places(self) -> Mapping[int, Place]:
        """Where each gradient goes, by the keys of their parameters."""
        return self._buckets.layout.places

    @property
    def step(self) -> Step | None:
        """The step that is going on."""
        return self._step

    def _prefix(self) -> str:
        """Of the names of collectives: others after ranks that disagreed, which may have left some unanswered."""
        return f"hvd_compress.{self.label}.{self._series:x}"

    @property
    def waiting(self) -> int:
        """How many gradients have come in this step, 0 between steps."""
        return self._step.waiting if self._step else 0

    def broken_off(self) -> bool:
        """Whether a step has begun whose results nobody will ask for, as its caller remembers nothing of it.

        What another thread has added may only just be on its way to the caller.
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
            The vote to be reduced in its place, and the ticket to take the result with.
        """
        self._buckets.check_place(key, grad, self._cure)
        if self.waiting and key in self._seen:
            name = self._buckets.name(key)
            raise ExchangeError(f"the gradient of {name!r} came twice in one step: call optimizer.step() in between")
        step = self._step or self._begin_step()
        self._threads.add(threading.get_ident())
        if not self.begun:
            self._early[key] = Came.IN_BACKWARD if in_backward() else Came.LATE
        self._seen.add(key)
        vote, entry = step.add(key, grad, parameter, call)
        return vote, Ticket(self, step, entry)

    def _begin_step(self) -> Step:
        scale = self._loss_scale.read()
        if self._next is not None:
            self._buckets.change(self._next)
            self._next = None
        self._threads, self._seen = set(), set()
        self._early = dict.fromkeys(self._buckets.keys, Came.NEVER)
        self._counted = self._verified = False
        meets = agreement.elastic() and self._met != self.transport.epoch
        if meets:
            self.transport = self.transport.renewed()
            self._epoch, self._buckets.size = self.transport.epoch, self.world.size
        votes = self._ballot(self.world, self._due)
        step = Step(votes, self.transport, self._prefix(), self._meter, scale, self._replaces, self._lock)
        self._step = step
        if not (meets or self._due) and self.begun:
            step.release(self._buckets.layout)
        if self._due and not self.transport.ordered:  # where the order counts, all ranks greet at the same time: later
            self._greet()
            at_end_of_backward(self.verify_soon)
        return step

    def take(self, vote: Tensor, ticket: Ticket) -> Tensor:
        """Give out a result; the first call of a step completes all exchanges, the last one ends the step.

        Args:
            vote: As it came back.
            ticket: From `add`.

        Raises:
            DisagreementError: If the ranks were not set up alike, or do not go on from the same saved state.
            ExchangeError: If an exchange went wrong, or the step was given up.
            UnsupportedError: If a rank is missing.
        """
        step = ticket.step
        if step is not self._step:
            raise ExchangeError(f"a gradient of shape {tuple(ticket.entry.grad.shape)} is of a step that was given up")
        try:
            if not step.completed:
                self._prepare(step, step.votes.check(vote, ticket.entry.number))
        except UnsupportedError:
            self.abort()
            raise
        result = step.take(vote, ticket.entry)
        if step.ended:
            self._end(step)
        return result

    def _prepare(self, step: Step, asked: bool) -> None:
        """Make sure that the step is right, now that all gradients have come."""
        if agreement.elastic():
            self._meet()
        elif asked and not self._verified:
            self._greet().wait(sleep=self._lock.wait)
            self._verify()
        if not self.begun:
            self._buckets.begin(self._came_anywhere())
            self._tune()
        if step.held:
            step.release(self._buckets.layout)

    def _greet(self) -> Handshake:
        """Begin to verify that the ranks agree; a handshake left by a step that was given up is used."""
        if self._handshake is None:
            facts = agreement.describe(self._method, self._merge, self._facts, self.identity)
            # All ranks make direct calls in the same order, so they meet at the same place whatever the names.
            place = place_of(one.name for one in self._facts) if self._replaces else ""
            self._handshake = Handshake(facts, place, self.transport, afresh=self._due)
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
            if self._step is not None:
                self._step.votes.settle(PATIENCE)
            self._drop()
            raise
        self._due = False
        self._verified = True

    def _came_anywhere(self) -> dict[int, Came]:
        """Ask the other ranks which gradients have come, and how."""
        keys = self._buckets.keys
        mine = torch.tensor([self._early[key] for key in keys], dtype=torch.int32, device="cpu")
        handle = self.transport.start(AllReduce(mine, "max"), f"hvd_compress.{self.label}.came")
        return dict(zip(keys, map(Came, wait(handle, self._lock.wait).tolist()), strict=True))

    def _end(self, step: Step) -> None:
        step.end()
        self._counted, self.changed, self._step = step.finite, step.changed, None
        self.steps += 1
        if step.finite and self._tuner is not None and (cuts := self._tuner.end_step(self.transport)) is not None:
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
            for bucket in self.buckets:
                bucket.undo()
            self.steps -= 1
            self._due, self._counted = not agreement.elastic(), False

    def abort(self) -> None:
        """Give up a step that has begun: drop what has come and keep the states of before.

        Where the order of collectives counts, the ranks have given it up together, or the process group is lost.
        """
        if self._step is not None and self._epoch == self.transport.epoch and not self.transport.ordered:
            self._step.abort()
        self._drop()

    def _drop(self) -> None:
        """Forget the step that is going on."""
        step, self._step = self._step, None
        if step is not None:
            step.forget()

    def states(self) -> list[State]:
        """Return the states of all buckets."""
        return self._buckets.states()

    def living(self) -> set[int]:
        """Return the keys of the parameters that still exist and that no other reducer has taken over."""
        return self._buckets.living()

    def inherit(self, formers: Sequence[Reducer]) -> None:
        """Take over what former reducers have kept of the same parameters; of others they keep it."""
        formers = [former for former in formers if former.begun]
        if not formers:
            return
        if self._buckets.succeed([former._buckets for former in formers]):
            self._tuner = formers[0]._tuner
        else:
            self._tune()
        self.steps, self.job = max(former.steps for former in formers), sum(former.job for former in formers)
        self._series = sum(former._series for former in formers)

    def saved(self) -> SavedSession:
        """The states of all buckets, as copies."""
        buckets = {one.bucket.key: one.read() for one in self.buckets}
        search = self._tuner.timings if self._tuner else []
        came, partition = self._buckets.came, self._buckets.partition
        shared = fingerprint(buckets, {one.bucket.key: kinds(one.state) for one in self.buckets})
        world = self.world
        return SavedSession(world.rank, world.size, self.steps, buckets, partition, search, self.job, shared, came)

    def restore(self, saved: SavedSession) -> None:
        """Take over states that have been checked, and their partition if any will do."""
        self._buckets.restore(saved)
        if saved.came is not None:
            self._tune()
        self.steps, self.job = saved.steps, saved.job
        self._due, self._counted, self._next = not agreement.elastic(), False, None
        if self._buckets.fixed is not None:
            self._buckets.change(self._buckets.fixed)
        elif self._tuner is not None:
            self._tuner.resume(saved.search)
            if self._tuner.cuts is not None:
                self._buckets.change(pin(self._tuner.cuts))

    def _meet(self) -> None:
        """In an elastic job, find out at the first step after Horovod was started which ranks there are now.

        Raises:
            DisagreementError: If a newcomer is not set up as the others are.
        """
        if self._met == self.transport.epoch:
            return
        meeting = self._membership.meet(
            self.world,
            self.steps,
            self._gather,
            agreement.describe(self._method, self._merge, self._facts),
            self.by_bucket,
        )
        self._met = self.transport.epoch
        if meeting is not None:
            self.job = meeting.job
            if meeting.leaves:
                world = self.world
                self.restore(SavedSession(world.rank, world.size, meeting.steps, meeting.leaves, job=meeting.job))

    def _gather(self, data: bytes, name: str) -> bytes:
        """Join the bytes of all ranks, in the order of ranks."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        handle = self.transport.start(
            AllGather(mine, ragged=True), f"{name}.{place_of(one.name for one in self._facts)}"
        )
        return bytes(wait(handle).numpy())

    def by_bucket(self, saved: SavedSession | None = None) -> dict[str, Kept]:
        """Return the states of all buckets, by their keys; new ones for those of a saved state.

        Raises:
            StateError: If the reducer cannot go on with their partition.
        """
        return self._buckets.by_key(saved)
