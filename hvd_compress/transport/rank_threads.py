"""Run the ranks of a job as threads of one process, for tests of what runs over a transport."""

from __future__ import annotations

import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal, TypeAlias, TypeVar

from hvd_compress.core.collectives import Collective, Scope, World
from hvd_compress.errors import ExchangeError
from hvd_compress.ops import Ops
from hvd_compress.transport.lockstep import LocalHandle, Switchboard
from hvd_compress.transport.lowering import LACKS

T = TypeVar("T")

Matching: TypeAlias = Literal["names", "channels", "turns"]
"""How collectives of different ranks are matched: by their names, as Horovod does; by their order, with a channel for
each bucket, as `torch.distributed` does over Gloo; or by their order alone, as it does over NCCL."""

_LATE = 0.25
"""Share of the questions for a reply that are answered with "not yet" although it is there."""


class DeadlockError(RuntimeError):
    """Ranks that wait for each other; the message has the position of each."""


class RankGoneError(RuntimeError):
    """Collective with a rank that has ended."""


class RankThreads:
    """Ranks as threads.

    One thread runs at a time. Each call of the transport is a point where another one may go on; a seed decides which,
    and how late replies arrive. So a seed reproduces an order, unless the program gives up a wait after some time.

    Example:
        >>> import numpy as np
        >>> from hvd_compress.core.collectives import AllReduce
        >>> from hvd_compress.ops.numpy import NumpyOps
        >>> ranks = RankThreads(3, NumpyOps())
        >>> ranks.run(lambda transport: int(transport.start(AllReduce(np.array(transport.world.rank)), "x").result()))
        [3, 3, 3]

    Args:
        size: Number of ranks.
        ops: Primitives of the framework of all arrays; collectives are computed in numpy.
        local_size: Number of ranks on each node.
        seed: Seed of the order.
        matching: How collectives are matched.
        deadline: Seconds without progress of any rank after which all end with a `DeadlockError`; a first
            call compiles kernels.
    """

    def __init__(
        self,
        size: int,
        ops: Ops,
        local_size: int = 1,
        seed: int = 0,
        matching: Matching = "names",
        deadline: float = 60.0,
    ) -> None:
        self.matching = matching
        self.deadline = deadline
        self._ops = ops
        self._local_size = local_size
        self._random = random.Random(seed)
        self._go = [threading.Semaphore(0) for _ in range(size)]
        self._threads: list[threading.Thread] = []
        self._running: list[int] = []
        self._waits: dict[int, str] = {}
        self._blocked: set[int] = set()
        self._errors: list[BaseException] = []
        self._broken: Exception | None = None
        self._moved = 0.0
        self._boards: dict[tuple[int, tuple[int, ...]], Switchboard] = {}
        self._current = {rank: self.transport(rank, range(size), 0) for rank in range(size)}

    def run(self, program: Callable[[ThreadTransport], T]) -> list[T]:
        """Run a program on each rank.

        Args:
            program: Called with the transport of its rank.

        Returns:
            The results, by rank.

        Raises:
            Exception: The first error of a rank.
            DeadlockError: If the ranks wait for each other, or one waits outside of the transport.
        """
        results: dict[int, T] = {}

        def follow(rank: int) -> None:
            self._go[rank].acquire()
            try:
                results[rank] = program(self._current[rank])
            except BaseException as error:
                self._errors.append(error)
            self._running.remove(rank)
            self._progress(rank)
            if self._running:
                self._go[self._random.choice(self._running)].release()

        self._running, self._errors, self._broken = list(range(len(self._go))), [], None
        self._threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in self._running]
        self._progress(0)
        for thread in self._threads:
            thread.start()
        self._go[self._random.choice(self._running)].release()
        for thread in self._threads:
            while thread.is_alive() and self._idle_for() < 2 * self.deadline:
                thread.join(self.deadline / 10)
        if self._errors:
            raise self._errors[0]
        if self._running:
            raise DeadlockError(self._positions())
        return [results[rank] for rank in range(len(self._go))]

    def transport(self, thread: int, threads: Sequence[int], epoch: int) -> ThreadTransport:
        """Return the transport of a thread among some of them, which are then the ranks.

        Args:
            thread: Number of the thread.
            threads: Numbers of the threads that take part.
            epoch: Number that is different whenever these change.
        """
        members = tuple(threads)
        local_size = self._local_size if len(members) % self._local_size == 0 else 1
        board = self._boards.setdefault((epoch, members), Switchboard(len(members), local_size, self._ops))
        return ThreadTransport(self, thread, members, board.worlds[members.index(thread)], epoch, board)

    def restart(self, thread: int, threads: Sequence[int], epoch: int) -> None:
        """Change the ranks, as an elastic job does; a thread calls it between two steps; see `transport`."""
        self._current[thread] = self.transport(thread, threads, epoch)

    def current(self, thread: int) -> ThreadTransport:
        """Return the transport of the current ranks."""
        return self._current[thread]

    def _idle_for(self) -> float:
        return time.monotonic() - self._moved

    def _progress(self, rank: int) -> None:
        """Note that a rank has gone on."""
        self._moved = time.monotonic()
        self._blocked.clear()
        self._waits.pop(rank, None)

    def pause(self, thread: int) -> None:
        """Let the thread go on that the seed chooses, which may be the same one.

        Raises:
            DeadlockError: If no rank can go on.
            ExchangeError: If ranks have started different collectives.
        """
        chosen = self._random.choice(self._running)
        if chosen != thread:
            self._go[chosen].release()
            self._go[thread].acquire()
        if self._broken is not None:
            raise self._broken

    def start(self, transport: ThreadTransport, message: Collective, name: str) -> LocalHandle:
        """Start a collective of one rank.

        Raises:
            ExchangeError: If it differs from what other ranks have started.
        """
        self._progress(transport.thread)
        try:
            handle = transport.board.start(transport.world, message, name)
        except ExchangeError as error:
            self._broken = error
            raise
        self.pause(transport.thread)
        return handle

    def arrived(self, transport: ThreadTransport, handle: LocalHandle, what: str, for_good: bool) -> bool:
        """Return whether a reply has arrived.

        Args:
            transport: Transport of the rank.
            handle: The collective.
            what: Its description.
            for_good: Whether the rank does nothing else before it has arrived.

        Raises:
            DeadlockError: If no rank can go on.
            RankGoneError: If a rank that takes part has ended.
        """
        thread = transport.thread
        self.pause(thread)
        if handle.done():
            if self._random.random() < _LATE:
                return False
            self._progress(thread)
            return True
        self._waits[thread] = what
        for rank in sorted(transport.board.lacking(handle)):
            if transport.threads[rank] not in self._running:
                raise RankGoneError(f"rank {transport.world.rank} {what}, but rank {rank} has ended")
        if for_good:
            self._blocked.add(thread)
        if self._blocked.issuperset(self._running) or self._idle_for() > self.deadline:
            self._broken = DeadlockError(self._positions())
            raise self._broken
        return False

    def _positions(self) -> str:
        """Describe where each rank stands."""
        frames = sys._current_frames()
        rows = ["the ranks wait for each other:"]
        for rank in self._running:
            frame = frames.get(self._threads[rank].ident or 0)
            stack = traceback.extract_stack(frame) if frame is not None else []
            own = [one for one in stack if one.filename not in (__file__, threading.__file__)]
            where = " < ".join(f"{one.filename}:{one.lineno} in {one.name}" for one in own[:-6:-1])
            rows.append(f"rank {rank} {self._waits.get(rank, 'waits for something else')} at {where}")
        return "\n  ".join(rows)


@dataclass(frozen=True)
class ThreadTransport:
    """Transport of one rank among `RankThreads`.

    Attributes:
        ranks: All ranks.
        thread: Number of its thread.
        threads: Numbers of the threads of all ranks.
        world: This rank.
        number: Number of the set of ranks.
        board: Switchboard of the set of ranks.
        channel: Name of the channel, where the order of collectives counts.
    """

    ranks: RankThreads = field(repr=False)
    thread: int
    threads: tuple[int, ...]
    world: World
    number: int
    board: Switchboard = field(repr=False)
    channel: str = ""
    _counts: Counter[Scope] = field(default_factory=Counter, repr=False, compare=False)
    _channels: dict[str, ThreadTransport] = field(default_factory=dict, repr=False, compare=False)
    _connected: list[bool] = field(default_factory=list, repr=False, compare=False)
    _serials: Iterator[int] = field(default_factory=count, repr=False, compare=False)

    missing = LACKS
    members = ()

    @property
    def epoch(self) -> tuple[int, int, int]:
        """Identifier of the current ranks, and of the thread: threads share what a process keeps for an epoch."""
        return id(self.ranks), self.thread, self.renewed().number

    @property
    def ordered(self) -> bool:
        """Whether all ranks must start collectives in the same order."""
        return self.ranks.matching != "names"

    def apart(self) -> ThreadTransport:
        """Return a transport of the same ranks whose buckets have channels of their own."""
        return replace(self, _channels={}, _connected=[])

    def channels(self, keys: Sequence[str]) -> Mapping[str, ThreadTransport] | None:
        """Return a transport for each bucket, or None if they take turns."""
        if self.ranks.matching == "names":
            return dict.fromkeys(keys, self)
        if self.ranks.matching == "turns":
            return None
        for key in keys:
            if key not in self._channels:
                channel = f"{self.channel}/{next(self._serials)}"
                self._channels[key] = replace(self, channel=channel, _counts=Counter(), _channels={})
        return self._channels

    def connect(self) -> None:
        """Make collectives within a node and across nodes possible."""
        self._connected.append(True)

    def renewed(self) -> ThreadTransport:
        """Return the transport of the current ranks."""
        return self.ranks.current(self.thread)

    def start(self, message: Collective, name: str) -> ThreadHandle:
        """Start a collective; within a node or across nodes only after `connect`."""
        if message.scope != "world" and not self._connected:
            raise ExchangeError(f"a collective of scope {message.scope!r} was started before connect()")
        if self.ordered:
            name = f"{self.channel}#{self._counts[message.scope]}"
            self._counts[message.scope] += 1
        kind = f"for {type(message).__name__} {name!r} of {tuple(message.array.shape)} {message.array.dtype}"
        return ThreadHandle(self, self.ranks.start(self, message, name), f"waits {kind}")


@dataclass
class ThreadHandle:
    """Handle of a collective in flight.

    Attributes:
        transport: Transport of the rank.
        handle: The collective.
        what: Its description.
    """

    transport: ThreadTransport
    handle: LocalHandle
    what: str
    _arrived: bool = False

    def done(self) -> bool:
        """Return whether the reply has arrived; others may go on meanwhile."""
        return self._ask(for_good=False)

    def result(self) -> Any:
        """Wait for the reply and return it.

        Raises:
            RankGoneError: If a rank that takes part has ended.
            DeadlockError: If no rank can go on.
        """
        while not self._ask(for_good=True):
            pass
        return self.handle.result()

    def _ask(self, for_good: bool) -> bool:
        if not self._arrived:
            self._arrived = self.transport.ranks.arrived(self.transport, self.handle, self.what, for_good)
        return self._arrived
