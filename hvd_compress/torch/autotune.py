"""Autotune the bucket boundaries of one optimizer during training."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from hvd_compress.core.bucketing import Cuts
from hvd_compress.core.collectives import Broadcast
from hvd_compress.engine.bucket_autotune import Search, Timing
from hvd_compress.torch.waiting import wait
from hvd_compress.transport.protocol import Handle, Transport

_LOG = logging.getLogger("hvd_compress")


class Tuner:
    """Time the steps of an optimizer, and choose the partition of the next one.

    All ranks use the timings of rank 0, so that they choose the same partitions.

    Args:
        sizes: Bytes of the gradients, in backward order.
        name: Name of its collective.
    """

    def __init__(self, sizes: Sequence[int], name: str) -> None:
        self._sizes = sizes
        self._name = name
        self._logs = False
        self.resume(())

    def resume(self, timings: Sequence[Sequence[float]] | None) -> None:
        """Resume a saved search; None if it had ended."""
        self._search = None if timings is None else Search(self._sizes, timings)
        self._agreeing: Handle | None = None
        self._ended = time.perf_counter()

    @property
    def timings(self) -> list[list[float]] | None:
        """Timings of the search so far, to be saved; None if it has ended."""
        return [list(timing) for timing in self._search.timings] if self._search else None

    @property
    def cuts(self) -> Cuts | None:
        """Partition of the current candidate; None if the search has ended."""
        return self._search.cuts if self._search else None

    def end_step(self, transport: Transport) -> None:
        """Record the end of a completed step, and start to tell rank 0's timing; `decide` waits for it.

        Args:
            transport: Transport of the ranks.
        """
        if self._search is None or self._search.settled:
            return
        now = time.perf_counter()
        timing = self._search.record(now - self._ended)
        self._ended = now
        if timing is not None:
            mine = torch.tensor(timing, dtype=torch.float64, device="cpu")
            self._agreeing = transport.start(Broadcast(mine, root=0), self._name)
            self._logs = transport.world.rank == 0

    def decide(self, sleep: Callable[[float], object]) -> Cuts | None:
        """Return the partition that the last step leads to, once rank 0's timing has come; None if it stays.

        Args:
            sleep: See `nap`.
        """
        search, agreeing = self._search, self._agreeing
        if search is None or agreeing is None:
            return None
        told = wait(agreeing, sleep)
        if self._agreeing is not agreeing:  # another thread has decided meanwhile
            return None
        self._agreeing = None
        search.decide(Timing(*told.tolist()))
        if search.settled:
            self._search = None
            if self._logs:
                _LOG.info(search.report())
        return search.cuts
