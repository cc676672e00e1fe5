"""Autotune the bucket boundaries, or the method, of one optimizer during training."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvd_compress.core.collectives import AllReduce, Broadcast
from hvd_compress.engine.bucket_autotune import Search
from hvd_compress.engine.race import PROBES, Race, Stage
from hvd_compress.transport.protocol import Handle, Transport

_LOG = logging.getLogger("hvd_compress")


class Tuner:
    """Time the steps of an optimizer, and choose the partition or the method of the next one.

    All ranks use the timings of rank 0, so that they choose the same. This class is for transports of numpy arrays,
    which wait for each collective; adapters of other arrays override `numbers`, `zeros` and `wait`.

    Args:
        search: The search of a partition, or the race of methods.
        label: Label of the reducer, part of the names of its collectives.

    Attributes:
        search: The search of a partition, or the race of methods.
    """

    def __init__(self, search: Search | Race, label: str) -> None:
        self.search = search
        self._name = f"hvd_compress.{label}.search"
        self._agreeing: Handle | None = None
        self._ended = time.perf_counter()

    def numbers(self, values: Sequence[float]) -> Any:
        """Return an array of float64 in the memory of the CPU."""
        return np.array(values, np.float64)

    def zeros(self, count: int) -> Any:
        """Return an array of float32 where the gradients are."""
        return np.zeros(count, np.float32)

    def wait(self, handle: Handle, sleep: Callable[[float], object]) -> Any:
        """Return the reply of a collective; sleep by the given function while it has not come."""
        del sleep
        return handle.result()

    def end_step(self, transport: Transport) -> None:
        """Record the end of a completed step, and start to tell rank 0's timing; `decide` waits for it.

        Args:
            transport: Transport of the ranks.
        """
        now = time.perf_counter()
        told = self.search.record(now - self._ended)
        self._ended = now
        if told is not None:
            self._agreeing = self._tell(told, transport)

    @property
    def race(self) -> Race | None:
        """The race of methods; None for the search of a partition."""
        return self.search if isinstance(self.search, Race) else None

    def skip_step(self) -> None:
        """Leave out the time of a step that does not count."""
        self._ended = time.perf_counter()

    def _tell(self, mine: Sequence[float], transport: Transport) -> Handle:
        return transport.start(Broadcast(self.numbers(mine), root=0), self._name)

    def decide(self, transport: Transport, sleep: Callable[[float], object] = time.sleep) -> None:
        """Take what the last step leads to, once rank 0's timing has come.

        Args:
            transport: Transport of the ranks.
            sleep: See `wait`.
        """
        agreeing = self._agreeing
        if agreeing is None:
            return
        told = self.wait(agreeing, sleep)
        if self._agreeing is not agreeing:  # another thread has decided meanwhile
            return
        self._agreeing = None
        self.search.decide(told.tolist())
        if self.race is not None and self.race.asks is Stage.PROBE:
            self.search.decide(self._probe(transport, sleep))
        news = self.search.news()
        if news and transport.world.rank == 0:
            _LOG.info(news)

    def _probe(self, transport: Transport, sleep: Callable[[float], object]) -> Sequence[float]:
        """Return rank 0's seconds of the allreduces that tell how fast the link is; all ranks make them at a time."""
        seconds: dict[int, list[float]] = {}
        for nbytes in PROBES * 3:  # in the first turn, the ranks meet and make connections
            begin = time.perf_counter()
            message = AllReduce(self.zeros(nbytes // 4), donate=True)
            self.wait(transport.start(message, f"{self._name}.probe"), sleep)
            seconds.setdefault(nbytes, []).append(time.perf_counter() - begin)
        fastest = [min(seconds[nbytes][1:]) for nbytes in PROBES]
        told: list[float] = self.wait(self._tell(fastest, transport), sleep).tolist()
        return told
