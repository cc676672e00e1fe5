"""Run one step: collect gradients, exchange buckets, return results."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from hvd_compress.engine.stats import Meter
from hvd_compress.torch.backward import at_end_of_backward, in_backward
from hvd_compress.torch.bucket_exchange import BucketExchange
from hvd_compress.torch.bucket_state import BucketState, Layout, Place
from hvd_compress.torch.entry import Entry, GradientArrival
from hvd_compress.torch.verdict import StepVerdict
from hvd_compress.torch.waiting import StepLock, nap
from hvd_compress.transport.protocol import TrainingTransport

_LOOKS = 4
"""Maximum number of exchanges that are polled per gradient."""

_PATIENCE = 5.0
"""Seconds in which a placeholder returns, unless a rank waits for something else."""


class Step:
    """Step of an optimizer, from the first `add` until all results have been taken.

    Gradients are held until `release`. A bucket delivers its result as soon as it is complete. The result stays if
    another bucket's exchange fails later, or another gradient is not finite.

    Args:
        verdict: Verdict on the step.
        transport: Transport of the collectives of the buckets.
        prefix: Prefix of the names of these collectives.
        meter: Counters of bytes and time.
        scale: Loss scale of the gradients.
        replaces: Whether results are written to the gradients.
        lock: Lock that callers of all methods except `rest` hold; released while waiting.

    Attributes:
        verdict: Verdict on the step.
        scale: Loss scale of the gradients.
        entries: The gradients so far, by the keys of their parameters, in order of arrival.
        threads: Threads that have added them.
        finite: Whether the step counts: all gradients and results of all ranks are finite, as far as known.
        changed: Whether user code has written to a gradient since it arrived.
    """

    def __init__(
        self,
        verdict: StepVerdict,
        transport: TrainingTransport,
        prefix: str,
        meter: Meter,
        scale: float,
        replaces: bool,
        lock: StepLock,
    ) -> None:
        self.verdict = verdict
        self.scale = scale
        self.entries: dict[int, Entry] = {}
        self.threads: set[int] = set()
        self.finite = True
        self.changed = False
        self._taken = 0
        self._transport = transport
        self._prefix = prefix
        self._meter = meter
        self._replaces = replaces
        self._lock = lock
        self._factor: float | None = None
        self._peaks: list[float | Tensor] = []
        self._layout: Layout | None = None
        self._exchanges: dict[BucketState, BucketExchange] = {}
        self._running: deque[BucketExchange] = deque()
        self._in_turns = False

    @property
    def held(self) -> bool:
        """Whether gradients are held until `release`."""
        return self._layout is None

    @property
    def exchanges(self) -> list[BucketExchange]:
        """Exchanges of all buckets."""
        return list(self._exchanges.values())

    def release(self, layout: Layout) -> None:
        """Start to exchange gradients, including those held so far, in these buckets."""
        self._layout = layout
        channels = self._transport.channels([owner.bucket.key for owner in layout.buckets])
        self._in_turns = channels is None
        how = self._prefix, self._replaces, self.verdict.admits, self._meter.count
        self._exchanges = {
            owner: BucketExchange(owner, channels[owner.bucket.key] if channels else self._transport, *how)
            for owner in layout.buckets
        }
        for key, entry in self.entries.items():
            self._put(layout, key, entry)

    def add(self, key: int, grad: Tensor, parameter: Tensor | None, call: Hashable, used: bool) -> tuple[Tensor, Entry]:
        """Add a gradient.

        Returns:
            The placeholder to reduce instead of it, and the entry to `take` the result with.
        """
        lap = self._meter.begin()
        layout = self._layout
        entry = Entry(len(self.entries), grad, parameter, used)
        self.entries[key] = entry
        self.threads.add(threading.get_ident())
        peak = self._hold(entry) if layout is None else self._put(layout, key, entry)
        placeholder = self.verdict.give(peak, call, used)
        self._meter.gradient_bytes += grad.nbytes
        self._meter.bytes_sent += self.verdict.nbytes
        full = layout is not None and len(self.entries) == layout.expected
        if full and self._replaces and not self._transport.ordered:
            at_end_of_backward(self.rest)
        self._meter.encode += self._meter.lap(lap)
        return placeholder, entry

    def _hold(self, entry: Entry) -> float | Tensor:
        entry.arrival = GradientArrival.IN_BACKWARD if in_backward() else GradientArrival.LATE
        grad = entry.grad if self.scale == 1 else entry.grad / self.scale
        if not grad.is_cuda:
            return 0.0 if grad.isfinite().all() else math.nan
        return torch.linalg.vector_norm(grad.float(), ord=torch.inf) if grad.numel() else grad.new_zeros(())

    def _put(self, layout: Layout, key: int, entry: Entry) -> float | Tensor:
        place = layout.places.get(key)
        if place is None or not entry.grad.numel():
            return entry.grad.new_zeros(()) if entry.grad.is_cuda else 0.0
        entry.place, exchange = place, self._exchanges[place.owner]
        peak = exchange.put(entry, place.position, self.scale)
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
            factor = self.verdict.first_factor() if self._factor is None else self._factor
            if math.isfinite(factor):
                self._deliver(exchange, factor)

    def _deliver(self, exchange: BucketExchange, factor: float) -> None:
        self._note_changes(exchange.entries)
        self._peaks.append(exchange.deliver(factor * self.scale))

    def _note_changes(self, entries: Iterable[Entry]) -> None:
        self.changed = self.changed or any(entry.changed for entry in entries)

    def rest(self) -> None:
        """Wait asleep for the placeholders, at the end of a backward pass with all gradients.

        Horovod's own wait occupies a core. Without progress, return after some time, as another rank may wait for this
        one.
        """
        begin = moved = time.monotonic()
        before = -1
        with self._lock, self._meter.time("wait"):
            while not self.ended and not self.verdict.are_back():
                self.advance()
                if before != (before := self.verdict.under_way):
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

    def take(self, placeholder: Tensor, entry: Entry) -> Tensor:
        """Return a result; the first call completes all exchanges.

        Raises:
            ExchangeError: If an exchange failed.
        """
        if not self._taken:
            self._note_changes(self.entries.values())
            with self._meter.time("decode"):
                self._complete()
        self._taken += 1
        if self._replaces or entry.place is None:
            return entry.grad
        with self._meter.time("decode"):
            return self._computed(placeholder, entry.grad, entry.place)

    def arrival(self, key: int) -> GradientArrival:
        """Return when the gradient of a parameter arrived."""
        return self.entries[key].arrival if key in self.entries else GradientArrival.NEVER

    @property
    def first(self) -> int:
        """Key of the gradient that came first."""
        return next(iter(self.entries))

    @property
    def results(self) -> dict[int, Tensor]:
        """Gradients that have been replaced by results, by the keys of their parameters."""
        return {key: entry.grad for key, entry in self.entries.items()}

    @property
    def completed(self) -> bool:
        """Whether a result has been taken."""
        return self._taken > 0

    @property
    def ended(self) -> bool:
        """Whether all results have been taken, or the step was aborted."""
        return self._taken == len(self.entries)

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
        if self._replaces and self._factor is None and self.verdict.are_back():
            self._judge()
        self.advance()
        return bool(self._running) or (self._replaces and self._factor is None)

    def _judge(self) -> None:
        """Read the verdict on all gradients."""
        factors, entries = self.verdict.factors(), list(self.entries.values())
        for entry, factor in zip(entries, factors, strict=True):
            entry.nonfinite = not math.isfinite(factor)
        self._factor = next((factor for factor in factors if math.isfinite(factor)), math.nan)
        self.finite = self.finite and not any(entry.nonfinite for entry in entries)
        for number in self.verdict.unused():
            entries[number].used_anywhere = False
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
        for entry in self.entries.values():
            entry.overrule()

    def _computed(self, placeholder: Tensor, grad: Tensor, place: Place) -> Tensor:
        """Return the result of a direct call as a new tensor; placeholders of direct calls return one by one."""
        result, factor = torch.empty_like(grad), self.verdict.factor(placeholder)
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
        self.verdict.assume()
        for exchange in self.exchanges:
            exchange.halt() if self.verdict.lacking else exchange.drain()
        self.verdict.settle()

    def forget(self) -> None:
        """Drop the gradients, and keep the states from before the step."""
        for exchange in self.exchanges:
            exchange.settle(commit=False)
        for entry in self.entries.values():
            entry.dropped = True
        self.verdict.abandon()
        self._taken = len(self.entries)
