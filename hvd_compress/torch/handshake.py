"""Verification that all ranks compress the same gradients in the same way, without waiting in a backward pass."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable
from typing import NoReturn

import torch

from hvd_compress.checkpoint import agreement
from hvd_compress.core.collectives import AllGather, AllReduce
from hvd_compress.core.transport import Handle, Transport
from hvd_compress.errors import DisagreementError
from hvd_compress.torch.waiting import nap

PATIENCE = 2.0
"""Seconds to wait where another rank may legally come later: it may first want something of this one."""


_LATEST: dict[tuple[Hashable, str], Handshake] = {}
"""The latest handshake of each name in each epoch."""


class Handshake:
    """Compares what `agreement.describe` gives on each rank, by a sum of `agreement.digests`.

    Args:
        facts: What must be equal on all ranks, from `agreement.describe`.
        place: Where the ranks meet, in the names of collectives: the same on ranks that may have to be told that they
            differ, and not that of another handshake at the same time.
        transport: Performs the collectives.
        afresh: Whether this rank exchanges nothing before all agree.
    """

    def __init__(self, facts: bytes, place: str, transport: Transport, afresh: bool = True) -> None:
        self.facts = facts
        self._transport = transport
        self._name = f"hvd_compress.agreement.{place}"
        table = agreement.compared(facts)
        self._titles = list(table)
        self._mine = [int(afresh), agreement.job_of(facts), *agreement.digests(table.values())]
        self._sums: list[int] = []
        self._pending: Handle | None = None
        self._launch()

    def _launch(self) -> None:
        """Begin, unless a handshake of this name that nobody waits for any more is still on its way."""
        place = self._transport.epoch, self._name
        earlier = _LATEST.get(place)
        if earlier is None or earlier.done():
            _LATEST[place] = self
            mine = torch.tensor(self._mine, dtype=torch.int64, device="cpu")
            self._pending = self._transport.start(AllReduce(mine), self._name)

    def done(self) -> bool:
        """Whether the ranks have met."""
        if self._pending is None and not self._sums:
            self._launch()
        if self._pending is not None and self._pending.done():
            self._sums, self._pending = self._pending.result().tolist(), None
        return bool(self._sums)

    def wait(self, patience: float = math.inf, sleep: Callable[[float], object] = time.sleep) -> bool:
        """Wait for the other ranks, for so many seconds at most; tell whether they have come."""
        begin = time.monotonic()
        while not self.done() and time.monotonic() - begin < patience:
            nap(begin, sleep)
        return self.done()

    def verify(self) -> int:
        """Compare the ranks, once it is done.

        Returns:
            A number that these ranks have agreed on, for the states that they will save.

        Raises:
            DisagreementError: If they differ.
        """
        _, job, *sums = self._sums
        for title, same in zip(self._titles, agreement.equal(sums), strict=True):
            if not same:
                self._refuse(title)
        return job

    @property
    def all_afresh(self) -> bool:
        """Whether no rank has exchanged anything before all agreed; once it is done."""
        afresh, _, ranks, *_ = self._sums
        return ranks == afresh

    def _refuse(self, title: str) -> NoReturn:
        """Ask the ranks for the facts themselves; do without if not all of them can answer any more."""
        mine = torch.frombuffer(bytearray(self.facts), dtype=torch.uint8)
        handle = self._transport.start(AllGather(mine, ragged=True), f"{self._name}.facts")
        begin = time.monotonic()
        while not handle.done() and time.monotonic() - begin < PATIENCE:
            nap(begin)
        if handle.done():
            agreement.check(bytes(handle.result().numpy()))
        raise DisagreementError(
            f"the ranks disagree on the {title}: give all ranks the same model and the same compression"
        )


def place_of(names: Iterable[str]) -> str:
    """Return the meeting place of the ranks that have these parameters.

    Models that differ still share their smallest name in most cases; two optimizers have no name in common.
    """
    return min(names, default="")
