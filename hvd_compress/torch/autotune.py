"""The search for the best partition of one optimizer's gradients, on the steps of its training."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from hvd_compress.bucket_autotune import Search, Timing
from hvd_compress.bucketing import Cuts
from hvd_compress.core.collectives import Broadcast
from hvd_compress.core.transport import Transport
from hvd_compress.torch.waiting import wait

_LOG = logging.getLogger("hvd_compress")


class Tuner:
    """Times the steps of a session, and says which partition to take.

    Ranks agree on one timing for each candidate, that of rank 0, and so on all that follows from it.

    Args:
        sizes: Bytes of the gradients, in the order in which backward comes to them.
        name: Of its collective.
    """

    def __init__(self, sizes: Sequence[int], name: str) -> None:
        self._sizes = sizes
        self._name = name
        self.resume(())

    def resume(self, timings: Sequence[Sequence[float]] | None) -> None:
        """Go on with a search that was saved; there is none any more if that had ended (None)."""
        self._search = None if timings is None else Search(self._sizes, timings)
        self._ended = time.perf_counter()

    @property
    def timings(self) -> list[list[float]] | None:
        """Of the search so far, to be saved; None if it has ended."""
        return [list(timing) for timing in self._search.timings] if self._search else None

    @property
    def cuts(self) -> Cuts | None:
        """The partition that it wants; None if it has ended."""
        return self._search.cuts if self._search else None

    def end_step(self, transport: Transport) -> Cuts | None:
        """Note that all ranks have come to the end of a step that counts.

        Args:
            transport: Of the ranks.

        Returns:
            The partition for the next step; None once the search has ended.
        """
        search = self._search
        if search is None:
            return None
        now = time.perf_counter()
        timing = search.record(now - self._ended)
        self._ended = now
        if timing is not None:
            mine = torch.tensor(timing, dtype=torch.float64, device="cpu")
            search.decide(Timing(*wait(transport.start(Broadcast(mine, root=0), self._name)).tolist()))
        if search.settled:
            self._search = None
            if transport.world.rank == 0 and search.timings:
                _LOG.info(search.report())
        return search.cuts
