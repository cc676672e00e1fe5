"""Reduce the gradients of one optimizer."""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hvd_compress.checkpoint import agreement
from hvd_compress.checkpoint.elastic import Membership
from hvd_compress.checkpoint.resharding import BucketSnapshot
from hvd_compress.checkpoint.state_dict import SavedSession, fingerprint, same_parameters
from hvd_compress.core.bucketing import Gradient, Merge, pin
from hvd_compress.core.collectives import AllGather, AllReduce, State, World
from hvd_compress.core.method import Method
from hvd_compress.core.router import Router
from hvd_compress.core.state_tree import kinds
from hvd_compress.engine.bucket_autotune import Search
from hvd_compress.engine.race import Race, Stage
from hvd_compress.engine.stats import Meter
from hvd_compress.engine.survey import survey
from hvd_compress.errors import DisagreementError, ExchangeError, UnsupportedError
from hvd_compress.methods.wrappers.router import Auto
from hvd_compress.ops.torch_devices import exactly
from hvd_compress.torch.agreement import PATIENCE, Agreement
from hvd_compress.torch.autotune import Tuner
from hvd_compress.torch.backward import at_end_of_backward
from hvd_compress.torch.bucket_state import BucketState, Place
from hvd_compress.torch.buckets import Buckets, Member, facts_of
from hvd_compress.torch.discards import DiscardWatch
from hvd_compress.torch.entry import Entry, GradientArrival
from hvd_compress.torch.loss_scale import LossScale
from hvd_compress.torch.optimizers import is_adam
from hvd_compress.torch.step import Step
from hvd_compress.torch.updates import UpdateWatch
from hvd_compress.torch.verdict import StepVerdict
from hvd_compress.torch.waiting import StepLock, nap, wait
from hvd_compress.transport.nodes import connects
from hvd_compress.transport.protocol import Handle, TrainingTransport

_LOG = logging.getLogger("hvd_compress")


MakeVerdict: TypeAlias = Callable[[World, bool, bool], StepVerdict]
"""Creates the verdict on a step, given the ranks, whether this rank wants to verify that all agree, and whether it
wants to undo the last step."""


class EngineSettings(NamedTuple):
    """Settings that all reducers of a compressor share.

    Attributes:
        method: The method, as a router.
        merge: Assignment of gradients to buckets.
        meter: Counters of bytes and time.
        loss_scale: Loss scale of the gradients.
        lock: Lock that callers of all methods hold; released while waiting. Reducers that wait for each other share it.
        cure: Advice for error messages about parameters that were added to an optimizer.
    """

    method: Router
    merge: Merge
    meter: Meter
    loss_scale: LossScale
    lock: StepLock
    cure: str


class Reducer:
    """Reducer of the gradients of one optimizer.

    A step begins with the first `add` and ends with the last `take`. All gradients are added before any is taken.

    The first step, and the first one after a restored state, is held: nothing is exchanged before all ranks agree. The
    first step also shows which parameters have gradients, which determines the buckets.

    Args:
        common: Settings of all reducers of the compressor.
        members: The parameters, in the order in which the model uses them.
        transport: Transport of the collectives.
        make_verdict: Creates the verdict on a step.
        label: Name that is the same on all ranks, part of the names of its collectives.
        replaces: The results are written to the gradients, and placeholders are reduced in place.
        complete: Each step has the gradients of all members.
        direct: They are the tensors of a direct call: its label alone tells whose states are its own.

    Attributes:
        transport: Transport of the collectives; replaced when the ranks of an elastic job change.
        steps: Number of steps so far.
        changed: Whether user code changed gradients of the last step before they were reduced.

    Raises:
        GradientError: If a parameter's dtype cannot be compressed.
    """

    def __init__(
        self,
        common: EngineSettings,
        members: Sequence[Member],
        transport: TrainingTransport,
        make_verdict: MakeVerdict,
        label: str,
        replaces: bool = False,
        complete: bool = False,
        direct: bool = False,
    ) -> None:
        self.label = label
        self.transport = transport
        self.steps = 0
        self._elastic = agreement.elastic()
        self._membership = Membership(zlib.crc32(label.encode()))
        self._met: object = None
        self._make_verdict = make_verdict
        self._replaces, self._direct = replaces, direct
        self._method, self._merge, self._meter, self._loss_scale, self._lock, self._cure = common
        self._step: Step | None = None
        self._epoch = transport.epoch
        facts = facts_of((name, tensor) for _, name, tensor in members)
        self._agreement = Agreement(self._method, self._merge, facts, direct=not replaces)
        self._buckets = Buckets(self._method, self._merge, members, self.world)
        self._tuner: Tuner | None = None
        self._known: Sequence[Sequence[float]] | None = ()
        self._adam = True
        self._coming: Handle | None = None
        self._counted = self._thrown = self._undoes = self._told = self.changed = False
        self._discards: DiscardWatch | None = None
        self._updates: UpdateWatch | None = None
        # A newcomer in an elastic job knows nothing of the first step.
        if self._elastic or not replaces or complete:
            self._buckets.begin()
            if complete:
                self._tune()

    def watch(self, optimizers: Sequence[Any]) -> None:
        """Undo steps whose gradients are cleared before these optimizers apply them; without any, log them once.

        If the method delivers updates, refuse to apply others.
        """
        self._discards = DiscardWatch(self._buckets.parameters, optimizers)
        self._updates = UpdateWatch(optimizers) if self._method.preconditioned else None
        self._adam = is_adam(optimizers)
        if self.race is not None:
            self.race.adam = self._adam

    def follow(self, transport: TrainingTransport, make_verdict: MakeVerdict) -> None:
        """Go on with other ranks from the next step on."""
        self.transport, self._make_verdict = transport, make_verdict

    def _tune(self, saved: Sequence[Sequence[float]] | None = ()) -> None:
        """Start to choose the method, or to autotune the buckets if new ones can take over all states.

        Args:
            saved: What a saved job knows of it; None if there is nothing left to do.
        """
        self._tuner, self._known = None, saved
        if not self._replaces or saved is None:
            return
        search: Search | Race
        if isinstance(self._method, Auto):
            search = Race(self._method, self._adam, self.world.size, saved)
        elif self._buckets.fixed is None and self._buckets.divisible():
            search = Search(self._buckets.sizes(), saved)
        else:
            return
        devices = [parameter.device for parameter in self._buckets.parameters]
        self._tuner = Tuner(search, self.label, devices[0])

    @property
    def race(self) -> Race | None:
        """The race that chooses the method, if it is chosen by one."""
        return self._tuner.race if self._tuner else None

    def _saved_search(self) -> Sequence[Sequence[float]] | None:
        return self._tuner.search.saved if self._tuner else self._known

    @property
    def begun(self) -> bool:
        """Whether a step has completed: the same on all ranks, while an aborted step may leave buckets on some."""
        return self.steps > 0

    @property
    def world(self) -> World:
        """Ranks that take part."""
        return self.transport.world

    @property
    def gradients(self) -> Sequence[Gradient]:
        """The parameters of an optimizer or model; none for direct calls."""
        return () if self._direct or not self._replaces else self._buckets.gradients

    @property
    def buckets(self) -> Sequence[BucketState]:
        """Buckets with their states."""
        return self._buckets.layout.buckets

    @property
    def places(self) -> Mapping[int, Place]:
        """Places of the gradients, by the keys of their parameters."""
        return self._buckets.layout.places

    @property
    def step(self) -> Step | None:
        """The running step; None between steps."""
        return self._step

    def _prefix(self) -> str:
        """Return the prefix of the names of collectives; it changes after a disagreement, which may leave some open."""
        return f"hvd_compress.{self.label}.{self._agreement.series:x}"

    def name(self, key: int) -> str:
        """Return the name of a parameter."""
        return self._buckets.name(key)

    @property
    def waiting(self) -> int:
        """Number of gradients so far in this step, 0 between steps."""
        return len(self._step.entries) if self._step else 0

    def broken_off(self) -> bool:
        """Return whether the running step was abandoned, given that the caller has forgotten it.

        Gradients that only other threads have added do not count, as the caller may not have recorded them yet.
        """
        return self._step is not None and threading.get_ident() in self._step.threads

    def add(
        self, key: int, grad: Tensor, call: Hashable = None, parameter: Tensor | None = None, used: bool = True
    ) -> tuple[Tensor, Entry]:
        """Add a gradient.

        Args:
            key: Key of the member.
            grad: Its gradient.
            call: Equal for gradients that Horovod returns together.
            parameter: Its parameter, if any.
            used: Whether this rank has used the parameter; one that no rank has used keeps its gradient and state.

        Returns:
            The placeholder to reduce instead of it, and the entry to `take` the result with.
        """
        self._buckets.check_place(key, grad, self._cure)
        step = self._step or self._begin_step()
        if key in step.entries:
            name = self._buckets.name(key)
            raise ExchangeError(f"the gradient of {name!r} came twice in one step: call optimizer.step() in between")
        if self._undoes:
            self._decide(step, wait=self.transport.ordered)
        return step.add(key, grad, parameter, call, used)

    def _begin_step(self) -> Step:
        scale = self._loss_scale.read()
        self._undoes = self._thrown or self._throws()
        if self._epoch != self.transport.epoch:
            self._renew()
        self._follow_tuner()
        self._counted = self._thrown = False
        meets = self._elastic and self._met != self.transport.epoch
        verdict = self._make_verdict(self.world, self._agreement.due, self._undoes)
        step = Step(verdict, self.transport, self._prefix(), self._meter, scale, self._replaces, self._lock)
        self._step = step
        self._lock.running.add(self)
        if not (meets or self._agreement.due or self._undoes or self._surveys) and self._buckets.begun:
            step.release(self._buckets.layout)
        if self._agreement.due and not self.transport.ordered:  # else all ranks begin at the same time: later
            self._agreement.begin(self.transport, self.steps)
            at_end_of_backward(self.verify_soon)
        return step

    def _follow_tuner(self) -> None:
        """Change to the buckets or the method that the last step has decided on, if any."""
        if self._tuner is None or self._epoch != self.transport.epoch:  # then the question is lost
            return
        self._tuner.decide(self.transport, self._lock.sleep)
        self._apply(self._tuner.search)

    def _apply(self, search: Search | Race) -> None:
        if isinstance(search, Race):
            self._buckets.choose(search.choice)
        else:
            self._buckets.change(pin(search.cuts))

    @property
    def _surveys(self) -> bool:
        """Whether the race needs a survey of the gradients of this step."""
        return self.race is not None and self.race.asks is Stage.SURVEY

    def _survey(self, race: Race, step: Step) -> None:
        parts = self._buckets.parts({key: entry.grad for key, entry in step.entries.items()}, step.scale)
        with self._meter.time("encode"), exactly(self._buckets.parameters[0].device):
            race.facts = survey(parts, race.surveyed, self.world, self.transport.missing)

    def alone(self) -> Method | None:
        """Begin a step in which the caller is to sum each gradient by itself.

        Returns:
            The linear method to sum by; None if the gradients are to be passed to `add`.
        """
        race = self.race
        if race is None or not self.begun or self._agreement.due or self._epoch != self.transport.epoch:
            return None
        if self._thrown or self._throws():
            return None
        self._follow_tuner()
        method = race.linear()
        if method is None or not all(bucket.clean for bucket in self.buckets):
            return None
        self._counted = False
        return method

    def end_alone(self) -> None:
        """End a step that `alone` has begun."""
        assert self._tuner is not None
        self.steps += 1
        self._meter.steps += 1
        self._tuner.end_step(self.transport)

    def _renew(self) -> None:
        """Go on with the ranks that there are now; in an elastic job, they meet at the end of the step.

        Raises:
            UnsupportedError: If the state is divided among the former ranks.
        """
        transport = self.transport.renewed()
        if not self._elastic:
            self._buckets.check_movable(transport.world)
        self._agreement.renew()
        self.transport, self._epoch = transport, transport.epoch
        self._buckets.world = self.world
        self._coming = None
        self._undoes = False
        self._tune(self._saved_search())

    def _throws(self) -> bool:
        """Return whether the gradients of the last step were discarded, by an optimizer that is known."""
        watch = self._discards
        if not self._counted or watch is None or not watch.discarded() or not any(one.keeps for one in self.buckets):
            return False
        if not (watch.knows or self._told):
            self._told = True
            if self.world.rank == 0:
                _LOG.warning(
                    "gradients were reduced, and cleared before parameters changed, perhaps those of another net's loss"
                    " that flows back through this one, as in a GAN: what was not sent of them is added to the next"
                    " gradient. Run that backward pass within model.no_sync(), or pass register(model,"
                    " optimizer=optimizer), which undoes such steps"
                )
        return watch.knows

    def _decide(self, step: Step, wait: bool = False) -> None:
        """Undo the last step once all ranks are known to undo it; then exchange the gradients held so far.

        Where the order of collectives counts, each rank waits before its first one.
        """
        begin = time.monotonic()
        while (undoes := step.verdict.undoes()) is None and wait:
            nap(begin, self._lock.sleep)
        if undoes is None or not self._undoes:
            return
        self._undoes = False
        if undoes:
            self._undo()
        if not (self._agreement.due or self._surveys):
            step.release(self._buckets.layout)

    def take(self, placeholder: Tensor, entry: Entry) -> Tensor:
        """Return a result; the first call of a step completes all exchanges, the last one ends the step.

        Args:
            placeholder: The reduced placeholder.
            entry: The gradient, from `add`.

        Raises:
            DisagreementError: If the ranks have different models or settings, or resume from different saved states.
            ExchangeError: If an exchange failed, or the step was aborted.
            UnsupportedError: If a rank is missing.
        """
        step = self._step
        if step is None or entry.dropped:
            raise ExchangeError(f"a gradient of shape {tuple(entry.grad.shape)} belongs to a step that was aborted")
        try:
            if self._undoes and self.transport.ordered:  # before the verdict at its end
                self._decide(step, wait=True)
            if not step.completed:
                self._prepare(step, step.verdict.check(placeholder, entry.number))
        except UnsupportedError:
            self.abort()
            raise
        result = step.take(placeholder, entry)
        if step.ended:
            self._end(step)
        return result

    def _prepare(self, step: Step, asked: bool) -> None:
        """Verify the ranks, and create and release the buckets, once all gradients have arrived."""
        if self._elastic:
            self._meet()
        begin = time.monotonic()
        while not self._ready(step, asked):
            nap(begin, self._lock.sleep)

    def _ready(self, step: Step, asked: bool) -> bool:
        """Prepare as far as possible without waiting; return whether the buckets are released."""
        if asked and not (self._agreement.verified or self._elastic):
            self._agreement.begin(self.transport, self.steps)
            if not self._agreement.can_verify():
                return False
            self._verify()
        if self._undoes:
            self._decide(step)
            if self._undoes:
                return False
        if not self._buckets.begun:
            came = self._came_anywhere(step)
            if came is None:
                return False
            self._buckets.begin(came)
            self._tune()
        if step.held:
            if self._method.hierarchical:
                self.transport.connect()
            if self.race is not None:
                self.race.place(self._agreement.nodes and connects(self.transport))
                self._apply(self.race)
                if self._surveys:
                    self._survey(self.race, step)
            step.release(self._buckets.layout)
        return True

    def advance(self, advanced: object) -> None:
        """Advance the running step without waiting, while another one waits; see `StepLock.sleep`.

        Where the order of collectives counts, nothing is started before its turn.
        """
        step = self._step
        if step is None or step is advanced or self.transport.ordered:
            return
        all_came = len(step.entries) == len(self._buckets.keys) and not self._elastic
        if step.held and (self._undoes or all_came) and step.verdict.are_complete():
            self._ready(step, asked=self._agreement.due)
        step.advance()

    def push_on(self) -> None:
        """Advance the running step without waiting, where each bucket has a channel of its own."""
        if self._step is not None and not self._step.held:
            self._step.advance()

    def verify_soon(self) -> None:
        """Verify that the ranks agree, if the others arrive soon; they may legally arrive later."""
        with self._lock, self._meter.time("wait"):
            if self._agreement.wait(PATIENCE, self._lock.sleep):
                self._verify()

    def _verify(self) -> None:
        try:
            self._agreement.verify()
        except DisagreementError:
            if self._step is not None:
                self._step.verdict.settle(PATIENCE)
            self._drop()
            raise

    def _came_anywhere(self, step: Step) -> dict[int, GradientArrival] | None:
        """Return when gradients arrived, as the earliest over all ranks; None if not known yet.

        A collective that an aborted step has left goes on: other ranks may not have started it yet.
        """
        keys = self._buckets.keys
        if self._coming is None:
            mine = torch.tensor([step.arrival(key) for key in keys], dtype=torch.int32, device="cpu")
            self._coming = self.transport.start(AllReduce(mine, "max"), f"{self._prefix()}.came")
        if not self._coming.done():
            return None
        told, self._coming = self._coming.result().tolist(), None
        return dict(zip(keys, map(GradientArrival, told), strict=True))

    def _end(self, step: Step) -> None:
        step.end()
        self._counted, self.changed = step.finite, step.changed
        self._leave()
        self._agreement.verified = False
        self.steps += 1
        if self._discards is not None:
            self._discards.reduced(self._buckets.parameter(step.first))
        if step.finite and self._updates is not None:
            self._updates.reduced(step.results, step.scale)
        if step.finite and self._tuner is not None:
            self._tuner.end_step(self.transport)

    def discard(self) -> None:
        """Undo the last step, as its results were discarded.

        Raises:
            UnsupportedError: If gradients of the current step have not been reduced yet.
        """
        with self._lock:
            if self.waiting:
                raise UnsupportedError(
                    "compression.discard() takes back gradients that were reduced, but those of this step have not"
                    " been: call optimizer.synchronize() first"
                )
            if self._counted:
                self._undo()
                self._agreement.expire()
                self._counted = False

    def _undo(self) -> None:
        for bucket in self.buckets:
            bucket.undo()
        if self._tuner is not None:
            self._apply(self._tuner.search)
        self.steps -= 1

    def abort(self) -> None:
        """Abort a running step: drop its gradients, and keep the states from before it."""
        if self._step is not None and self._epoch == self.transport.epoch:
            if self._undoes:  # the others may undo the last step, and have begun to exchange
                self._decide(self._step, wait=True)
            self._step.abort()
        self._drop()

    def _drop(self) -> None:
        """Forget the running step."""
        step = self._leave()
        if step is not None:
            step.forget()

    def _leave(self) -> Step | None:
        """Return the step that was running."""
        step, self._step = self._step, None
        self._lock.running.discard(self)
        return step

    def states(self) -> list[State]:
        """Return the states of all buckets."""
        return self._buckets.states()

    def living(self) -> set[int]:
        """Return the keys of the parameters that still exist and that no other reducer has taken over."""
        return self._buckets.living()

    def inherit(self, formers: Sequence[Reducer]) -> None:
        """Take over the same parameters from former reducers, with their states."""
        for former in formers:
            if not former.begun:
                former._buckets.lend(self.living())
        formers = [former for former in formers if former.begun]
        if not formers:
            return
        thrown = [former._throws() for former in formers]
        self._thrown, self._told = any(thrown), any(former._told for former in formers)
        if self._buckets.succeed([former._buckets for former in formers], thrown):
            self._tuner = formers[0]._tuner
        else:
            self._tune(formers[0]._saved_search() if isinstance(self._method, Auto) else ())
        self.steps = max(former.steps for former in formers)
        self._agreement.job = sum(former._agreement.job for former in formers)
        self._agreement.series = sum(former._agreement.series for former in formers)

    def saved(self) -> SavedSession:
        """Return copies of the states of all buckets."""
        with self._lock:
            if self.race is None:  # which may go on with collectives, while a rank may save alone
                self._follow_tuner()
        buckets = {one.bucket.key: one.read() for one in self.buckets}
        search = self._saved_search()
        came, partition = self._buckets.came, self._buckets.partition
        shared = fingerprint(buckets, {one.bucket.key: kinds(one.state) for one in self.buckets})
        world = self.world
        return SavedSession(
            world.rank,
            world.size,
            self.steps,
            buckets,
            partition,
            search,
            self._agreement.job,
            shared,
            came,
            world.local_size,
            self.gradients,
            self.transport.members,
        )

    def restore(self, saved: SavedSession) -> None:
        """Restore checked states, and their partition unless ``merge`` fixes another one or parameters have changed."""
        self._buckets.restore(saved)
        same = same_parameters(saved, self.gradients)
        if saved.came is not None or self._tuner is not None:
            self._tune(saved.search if same else ())
        self.steps, self._agreement.job = saved.steps, saved.job
        self._agreement.expire()
        self._counted = False
        if self._buckets.fixed is not None:
            self._buckets.change(self._buckets.fixed)
        if self._tuner is not None and same:
            self._apply(self._tuner.search)

    def _meet(self) -> None:
        """In an elastic job, find changed ranks in the first step after Horovod was started.

        Raises:
            DisagreementError: If a new rank has another model or other settings.
        """
        if self._met == self.transport.epoch:
            return
        meeting = self._membership.meet(
            self.world,
            self.steps,
            self._gather,
            self._agreement.facts(self.world),
            self.by_bucket,
        )
        self._met = self.transport.epoch
        if meeting is not None:
            self._agreement.job = meeting.job
            if meeting.leaves:
                world = self.world
                self.restore(SavedSession(world.rank, world.size, meeting.steps, meeting.leaves, job=meeting.job))

    def _gather(self, data: bytes, name: str) -> bytes:
        """Concatenate the bytes of all ranks, in the order of ranks."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        handle = self.transport.start(AllGather(mine, ragged=True), f"{name}.{self._agreement.place}")
        return bytes(wait(handle).numpy())

    def by_bucket(self, saved: SavedSession | None = None) -> dict[str, BucketSnapshot]:
        """Return the states of all buckets by key, or initial states for the buckets of a saved state.

        Raises:
            StateError: If the saved partition does not match.
        """
        return self._buckets.by_key(saved)
