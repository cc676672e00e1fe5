"""Run one step: collect gradients, exchange buckets, return results."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hvd_compress.engine.stats import Meter
from hvd_compress.torch.backward import at_end_of_backward
from hvd_compress.torch.bucket_exchange import BucketExchange
from hvd_compress.torch.bucket_state import BucketState
from hvd_compress.torch.votes import Votes
from hvd_compress.torch.waiting import StepLock, nap
from hvd_compress.transport.protocol import TrainingTransport

_LOOKS = 4
"""Maximum number of exchanges that are polled per gradient."""

_PATIENCE = 5.0
"""Seconds in which a carrier returns, unless a rank waits for something else."""


class Entry(NamedTuple):
    """Gradient of a step.

    Attributes:
        number: Index in order of arrival, from 0.
        key: Key of its parameter.
        grad: The gradient.
        parameter: Its parameter; None in a direct call.
        own: Whether it was ``parameter.grad`` when it arrived.
        used: Whether this rank has used the parameter.
    """

    number: int
    key: int
    grad: Tensor
    parameter: Tensor | None
    own: bool
    used: bool

    @property
    def frozen(self) -> bool:
        """Whether its parameter is frozen, so that the result is zero."""
        return self.parameter is not None and not self.parameter.requires_grad

    @property
    def replaced(self) -> bool:
        """Whether its parameter has another gradient now."""
        return self.own and self.parameter is not None and self.parameter.grad is not self.grad


class Place(NamedTuple):
    """Place of a gradient.

    Attributes:
        name: Name of the parameter.
        owner: The bucket.
        position: Index within the bucket.
    """

    name: str
    owner: BucketState
    position: int


class Layout(NamedTuple):
    """Buckets of a step.

    Attributes:
        buckets: All buckets, with their states.
        places: Places of the gradients, by the keys of their parameters.
        expected: Number of gradients of a backward pass.
    """

    buckets: Sequence[BucketState]
    places: Mapping[int, Place]
    expected: int


class Step:
    """Step of an optimizer, from the first `add` until all results have been taken.

    A bucket delivers its result as soon as it is complete. The result stays if another bucket's exchange fails later,
    or another gradient is not finite.

    Args:
        votes: Votes of the step.
        transport: Transport of the collectives of the buckets.
        prefix: Prefix of the names of these collectives.
        meter: Counters of bytes and time.
        scale: Loss scale of the gradients.
        replaces: Whether results are written to the gradients.
        lock: Lock that callers of all methods except `rest` hold; released while waiting.

    Attributes:
        votes: Votes of the step.
        scale: Loss scale of the gradients.
        waiting: Number of gradients so far.
        finite: Whether the step counts: all gradients and results of all ranks are finite, as far as known.
        changed: Whether user code has written to a gradient since it arrived.
    """

    def __init__(
        self,
        votes: Votes,
        transport: TrainingTransport,
        prefix: str,
        meter: Meter,
        scale: float,
        replaces: bool,
        lock: StepLock,
    ) -> None:
        self.votes = votes
        self.waiting = self._taken = 0
        self.finite = True
        self.changed = False
        self._transport = transport
        self._prefix = prefix
        self._meter = meter
        self.scale = scale
        self._replaces = replaces
        self._lock = lock
        self._factor: float | None = None
        self._peaks: list[float | Tensor] = []
        self._spoilt: set[int] = set()
        self._places: Mapping[int, Place] = {}
        self._expected = 0
        self._exchanges: dict[BucketState, BucketExchange] = {}
        self._running: deque[BucketExchange] = deque()
        self._entries: list[Entry] = []
        self._versions: list[int] = []
        self._filling: defaultdict[BucketExchange, list[Entry]] = defaultdict(list)
        self._held: list[Entry] | None = []
        self._in_turns = False

    @property
    def held(self) -> bool:
        """Whether gradients are held until `release`."""
        return self._held is not None

    @property
    def exchanges(self) -> list[BucketExchange]:
        """Exchanges of all buckets."""
        return list(self._exchanges.values())

    def release(self, layout: Layout) -> None:
        """Start to exchange gradients, including those held so far, in these buckets."""
        held, self._held = self._held or [], None
        self._places, self._expected = layout.places, layout.expected
        channels = self._transport.channels([owner.bucket.key for owner in layout.buckets])
        self._in_turns = channels is None
        how = self._prefix, self._replaces, self.votes.admits, self._meter.count
        self._exchanges = {
            owner: BucketExchange(owner, channels[owner.bucket.key] if channels else self._transport, *how)
            for owner in layout.buckets
        }
        for entry in held:
            self._put(entry)

    def add(self, key: int, grad: Tensor, parameter: Tensor | None, call: Hashable, used: bool) -> tuple[Tensor, Entry]:
        """Add a gradient.

        Returns:
            The vote to reduce instead of it, and the entry to `take` the result with.
        """
        lap = self._meter.begin()
        own = parameter is not None and parameter.grad is grad
        entry = Entry(self.waiting, key, grad, parameter, own, used)
        self._entries.append(entry)
        self._versions.append(grad._version)
        peak = self._put(entry) if self._held is None else self._keep(self._held, entry)
        carrier = self.votes.give(peak, call, used)
        self._meter.gradient_bytes += grad.nbytes
        self._meter.bytes_sent += self.votes.nbytes
        self.waiting += 1
        if self.waiting == self._expected and self._replaces and self._held is None and not self._transport.ordered:
            at_end_of_backward(self.rest)
        self._meter.encode += self._meter.lap(lap)
        return carrier, entry

    def _keep(self, held: list[Entry], entry: Entry) -> float | Tensor:
        held.append(entry)
        grad = entry.grad if self.scale == 1 else entry.grad / self.scale
        if not grad.is_cuda:
            return 0.0 if grad.isfinite().all() else math.nan
        return torch.linalg.vector_norm(grad.float(), ord=torch.inf) if grad.numel() else grad.new_zeros(())

    def _put(self, entry: Entry) -> float | Tensor:
        place = self._places.get(entry.key)
        if place is None or not entry.grad.numel():
            return entry.grad.new_zeros(()) if entry.grad.is_cuda else 0.0
        exchange = self._exchanges[place.owner]
        self._filling[exchange].append(entry)
        peak = exchange.put(place.position, entry.grad, self.scale, entry.frozen, entry.used)
        if self._running and not self._in_turns:
            self._push_on()
        if exchange.busy:
            self._running.append(exchange)
        return peak

    def _push_on(self) -> None:
        """Poll the oldest exchanges, and start the second collectives of those whose first has ended."""
        for _ in range(min(len(self._running), _LOOKS)):
            exchange = self._running.popleft()
            self._look_at(exchange)
            if exchange.busy:
                self._running.append(exchange)

    def _look_at(self, exchange: BucketExchange) -> None:
        """Advance an exchange without waiting, and deliver its result if the factor is known and finite."""
        exchange.poll()
        if exchange.can_deliver:
            factor = self.votes.first_factor() if self._factor is None else self._factor
            if math.isfinite(factor):
                self._deliver(exchange, factor)

    def _deliver(self, exchange: BucketExchange, factor: float) -> None:
        entries = self._filling[exchange]
        self._note_changes(entries)
        self._peaks.append(exchange.deliver(factor * self.scale))
        for entry in entries:
            self._versions[entry.number] = entry.grad._version

    def _note_changes(self, entries: Sequence[Entry]) -> None:
        for entry in entries if not self.changed else ():
            if self._versions[entry.number] != entry.grad._version or entry.replaced:
                self.changed = True

    def rest(self) -> None:
        """Wait asleep for the votes, at the end of a backward pass with all gradients.

        Horovod's own wait occupies a core. Without progress, return after some time, as another rank may wait for this
        one.
        """
        begin = moved = time.monotonic()
        before = -1
        with self._lock, self._meter.time("wait"):
            while not self.ended and not self.votes.are_back():
                self.advance()
                if before != (before := self.votes.under_way):
                    moved = time.monotonic()
                elif time.monotonic() - moved > _PATIENCE:
                    break
                nap(begin, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self._lock.sleep(seconds, advanced=self)

    def advance(self) -> None:
        """Advance all exchanges without waiting, unless they take turns."""
        if self._in_turns:
            return
        for exchange in self._running:
            with self._meter.time("decode"):
                self._look_at(exchange)
        self._running = deque(exchange for exchange in self._running if exchange.busy)

    def take(self, carrier: Tensor, entry: Entry) -> Tensor:
        """Return a result; the first call completes all exchanges.

        Raises:
            ExchangeError: If an exchange failed.
        """
        if not self._taken:
            self._note_changes(self._entries)
            with self._meter.time("decode"):
                self._complete()
        self._taken += 1
        result, place = entry.grad, self._places.get(entry.key)
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
    def first(self) -> int:
        """Key of the gradient that came first."""
        return self._entries[0].key

    @property
    def results(self) -> dict[int, Tensor]:
        """Gradients that have been replaced by results, by the keys of their parameters."""
        return {entry.key: entry.grad for entry in self._entries}

    @property
    def completed(self) -> bool:
        """Whether a result has been taken."""
        return self._taken > 0

    @property
    def ended(self) -> bool:
        """Whether all results have been taken, or the step was aborted."""
        return self._taken == self.waiting

    def _complete(self) -> None:
        """Complete all exchanges, and write the results.

        It never waits for a single exchange, as another rank may wait for another one.
        """
        for exchange in self.exchanges:
            exchange.start()
        # In turns, those that were full come first: a rank whose gradients were held has started them in that order.
        in_order = dict.fromkeys([*self._running, *self.exchanges])
        self._running = deque(exchange for exchange in in_order if exchange.busy)
        if self._in_turns:
            self._take_turns()
        begin = time.monotonic()
        while self._unfinished():
            with self._meter.time("wait"):
                nap(begin, self._sleep)
        for exchange in self.exchanges:
            if exchange.error is not None:
                raise exchange.error
        if self._replaces:
            self._settle()

    def _take_turns(self) -> None:
        """Finish all exchanges round by round, so that all ranks start collectives in the same order.

        Collectives across nodes take no round of their own: the number of these may differ between groups of ranks.
        """
        while self._running:
            for exchange in self._running:
                first = True
                while first or exchange.across:
                    with self._meter.time("wait"):
                        exchange.halt()
                    exchange.wait()
                    first = False
            self._running = deque(exchange for exchange in self._running if exchange.busy)

    def _unfinished(self) -> bool:
        """Advance as far as possible without waiting; return whether exchanges remain."""
        if self._replaces and self._factor is None and self.votes.are_back():
            self._judge()
        self.advance()
        return bool(self._running) or (self._replaces and self._factor is None)

    def _judge(self) -> None:
        """Read all votes."""
        factors = self.votes.factors()
        self._spoilt = {number for number, factor in enumerate(factors) if not math.isfinite(factor)}
        self._factor = next((factor for factor in factors if math.isfinite(factor)), math.nan)
        self.finite = self.finite and not self._spoilt
        for entry in map(self._entries.__getitem__, self.votes.unused()):
            if (place := self._places.get(entry.key)) is not None and entry.grad.numel():
                self._exchanges[place.owner].leave(place.position)
        for exchange in self.exchanges:
            self._look_at(exchange)

    def _settle(self) -> None:
        """Write the remaining results, and commit the new states if the step counts."""
        assert self._factor is not None
        for exchange in self.exchanges:
            if exchange.can_deliver:
                self._peaks.append(exchange.deliver(self._factor * self.scale))
        self.finite = self.finite and all(math.isfinite(peak) for peak in self._peaks)
        for exchange in self.exchanges:
            exchange.settle(commit=self.finite)

    def _computed(self, carrier: Tensor, place: Place, entry: Entry) -> Tensor:
        """Return the result of a direct call as a new tensor; votes of direct calls return one by one."""
        result, factor = torch.empty_like(entry.grad), self.votes.factor(carrier)
        peak = self._exchanges[place.owner].deliver_one(place.position, factor * self.scale, result)
        self.finite = self.finite and math.isfinite(peak)
        return result

    def end(self) -> None:
        """Close the step after all results have been taken."""
        for exchange in self.exchanges:
            exchange.settle(commit=self.finite and not self._replaces)
        self._meter.steps += 1

    def abort(self) -> None:
        """Complete the exchanges of an aborted step, unless a rank is missing.

        The other ranks abort too, or wait for this one. In turns, all have started the same collectives.
        """
        if self._in_turns:
            return
        self.votes.assume()
        for exchange in self.exchanges:
            exchange.halt() if self.votes.lacking else exchange.drain()
        self.votes.settle()

    def forget(self) -> None:
        """Drop the gradients, and keep the states from before the step."""
        for exchange in self.exchanges:
            exchange.settle(commit=False)
        self.votes.abandon()
        self._taken = self.waiting
