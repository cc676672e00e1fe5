"""Verify that ranks agree on model and compression, without waiting in a backward pass."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable
from typing import NoReturn

import torch

from hvd_compress.checkpoint import agreement
from hvd_compress.core.collectives import AllGather, AllReduce
from hvd_compress.errors import DisagreementError
from hvd_compress.torch.waiting import nap
from hvd_compress.transport.protocol import Handle, Transport

PATIENCE = 2.0
"""Seconds to wait for ranks that may legally arrive later, as they may wait for this rank first."""


_IN_FLIGHT: dict[tuple[Hashable, str], Handshake] = {}
"""The handshake of each name in each epoch that not all ranks are known to have reached."""


class Handshake:
    """Comparison of the ranks' facts by a sum of `agreement.digests`.

    Args:
        facts: Facts that must be equal on all ranks, from `agreement.describe`.
        place: Part of the names of its collectives: the same on ranks whose facts may differ, and unique among
            concurrent handshakes.
        transport: Transport that performs the collectives.
        afresh: Whether this rank exchanges nothing before all agree.
    """

    def __init__(self, facts: bytes, place: str, transport: Transport, afresh: bool = True) -> None:
        self.facts = facts
        self._transport = transport
        self._name = f"hvd_compress.agreement.{place}"
        table = agreement.compared(facts)
        self._titles = list(table)
        self._mine = [int(afresh), agreement.job_of(facts), *agreement.digests(table.values())]
        self._place = transport.epoch, self._name
        self._sums: list[int] = []
        self._pending: Handle | None = None
        self._launch()

    def _launch(self) -> None:
        """Start, unless an abandoned handshake of this name is still in flight."""
        earlier = _IN_FLIGHT.get(self._place)
        if earlier is None or earlier.done():
            _IN_FLIGHT[self._place] = self
            mine = torch.tensor(self._mine, dtype=torch.int64, device="cpu")
            self._pending = self._transport.start(AllReduce(mine), self._name)

    def done(self) -> bool:
        """Return whether all ranks have arrived."""
        if self._pending is None and not self._sums:
            self._launch()
        if self._pending is not None and self._pending.done():
            self._sums, self._pending = self._pending.result().tolist(), None
            del _IN_FLIGHT[self._place]  # which would keep the process group
        return bool(self._sums)

    def wait(self, patience: float = math.inf, sleep: Callable[[float], object] = time.sleep) -> bool:
        """Wait for the other ranks, for at most ``patience`` seconds; return whether they have arrived."""
        begin = time.monotonic()
        while not self.done() and time.monotonic() - begin < patience:
            nap(begin, sleep)
        return self.done()

    def verify(self) -> int:
        """Compare the ranks, once all have arrived.

        Returns:
            The job number of these ranks, which their saved states carry.

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
        """Whether no rank exchanged anything before all agreed; valid once all have arrived."""
        afresh, _, ranks, *_ = self._sums
        return ranks == afresh

    def _refuse(self, title: str) -> NoReturn:
        """Gather the facts themselves for the message; omit them if some ranks do not answer."""
        mine = torch.frombuffer(bytearray(self.facts), dtype=torch.uint8)
        handle = self._transport.start(AllGather(mine, ragged=True), f"{self._name}.facts")
        begin = time.monotonic()
        while not handle.done() and time.monotonic() - begin < PATIENCE:
            nap(begin)
        if handle.done():
            agreement.check(bytes(handle.result().numpy()))
        raise DisagreementError(
            f"the ranks disagree on the {title}: use the same model and the same compression on all ranks"
        )


def place_of(names: Iterable[str]) -> str:
    """Return the ``place`` of a handshake over these parameters: their smallest name.

    Different models still share it in most cases, while two optimizers of a model share no name.
    """
    return min(agreement.unwrapped(names), default="")
