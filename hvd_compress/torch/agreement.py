"""Agreement of the ranks on model and compression, without waiting in a backward pass."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import NoReturn

import torch

from hvd_compress.checkpoint import agreement
from hvd_compress.core.bucketing import Gradient, Merge
from hvd_compress.core.collectives import AllGather, AllReduce, World
from hvd_compress.core.router import Router
from hvd_compress.errors import DisagreementError
from hvd_compress.torch.waiting import nap
from hvd_compress.transport.protocol import Handle, Transport

PATIENCE = 2.0
"""Seconds to wait for ranks that may legally arrive later, as they may wait for this rank first."""

_IN_FLIGHT: dict[tuple[Hashable, str], _Comparison] = {}
"""The comparison of each name in each epoch that not all ranks are known to have reached."""


class Agreement:
    """Comparison of model, method, settings and restored state between the ranks, before their first exchange.

    Args:
        method: The method.
        merge: Assignment of gradients to buckets.
        gradients: The compressed gradients.
        direct: Whether they are those of a direct call, which all ranks make in the same order.

    Attributes:
        due: Whether this rank exchanges nothing before all agree: in the first step, and after a restored state.
        verified: Whether all have agreed in this step.
        place: Part of the names of its collectives: the same on ranks that differ in part, while two optimizers of a
            model share none.
        job: Job number that the ranks agreed on, which their saved states carry; 0 before that.
        series: Job number of the ranks when all of them had exchanged nothing yet.
        nodes: Whether all nodes have as many ranks, if that was asked for.
    """

    def __init__(self, method: Router, merge: Merge, gradients: Sequence[Gradient], direct: bool = False) -> None:
        self.due = not agreement.elastic()
        self.verified = False
        self.job = self.series = 0
        self.nodes = False
        self.place = "" if direct else min(agreement.unwrapped(one.name for one in gradients), default="")
        self._method, self._merge, self._gradients = method, merge, gradients
        self._comparison: _Comparison | None = None

    def facts(self, world: World, restored: str = "") -> bytes:
        """Return what is compared; see `hvd_compress.checkpoint.agreement.describe`."""
        return agreement.describe(self._method, self._merge, self._gradients, world, restored)

    def expire(self) -> None:
        """Agree anew in the next step; in an elastic job, ranks compare in another way."""
        self.due, self.verified = not agreement.elastic(), False

    def renew(self) -> None:
        """Agree anew with other ranks than before."""
        self._comparison = None
        self.expire()

    def begin(self, transport: Transport, steps: int = 0, world: World | None = None) -> None:
        """Start to compare, or continue the comparison of an aborted step.

        Args:
            transport: Transport of the ranks.
            steps: Number of steps so far, of which a restored state may have some.
            world: Ranks whose nodes are compared, if they are a part of those of the transport.
        """
        if self._comparison is None:
            restored = f"step {steps} of job {self.job:x}" if self.job else ""
            facts = self.facts(world or transport.world, restored)
            self._comparison = _Comparison(facts, self.place, transport, self.due)

    def can_verify(self) -> bool:
        """Return whether all ranks compare now."""
        return self._comparison is not None and self._comparison.done()

    def wait(self, patience: float = math.inf, sleep: Callable[[float], object] = time.sleep) -> bool:
        """Wait for the other ranks, for at most ``patience`` seconds; return whether there is something to verify."""
        begin, awaited = time.monotonic(), self._comparison
        while awaited is not None and not awaited.done() and time.monotonic() - begin < patience:
            nap(begin, sleep)
        return awaited is self._comparison and self.can_verify()

    def verify(self) -> None:
        """Compare the ranks, once all have arrived.

        Raises:
            DisagreementError: If they differ.
        """
        comparison, self._comparison = self._comparison, None
        assert comparison is not None
        self.job, self.nodes = comparison.verify()
        if comparison.all_due:
            self.series = self.job
        self.due, self.verified = False, True


class _Comparison:
    """Comparison of the ranks' facts by a sum of `agreement.digests`.

    Args:
        facts: The facts of this rank.
        place: Part of the names of its collectives: the same on ranks whose facts may differ, and unique among
            concurrent comparisons.
        transport: Transport that performs the collectives.
        due: Whether this rank exchanges nothing before all agree.
    """

    def __init__(self, facts: bytes, place: str, transport: Transport, due: bool) -> None:
        self._facts = facts
        self._transport = transport
        self._name = f"hvd_compress.agreement.{place}"
        table = agreement.compared(facts)
        self._titles = list(table)
        self._mine = [int(due), agreement.job_of(facts), *agreement.digests(table.values())]
        self._place = transport.epoch, self._name
        self._sums: list[int] = []
        self._pending: Handle | None = None
        self._launch()

    def _launch(self) -> None:
        """Start, unless an abandoned comparison of this name is still in flight."""
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

    def verify(self) -> tuple[int, bool]:
        """Compare the ranks, once all have arrived.

        Returns:
            Their job number, and whether they have facts that may differ, and are equal.

        Raises:
            DisagreementError: If others differ.
        """
        _, job, *sums = self._sums
        same = dict(zip(self._titles, agreement.equal(sums), strict=True))
        nodes = same.pop(agreement.MAY_DIFFER, False)
        for title in same:
            if not same[title]:
                self._refuse(title)
        return job, nodes

    @property
    def all_due(self) -> bool:
        """True if the agreement was due on every rank; known once `done`."""
        due, _, ranks, *_ = self._sums
        return ranks == due

    def _refuse(self, title: str) -> NoReturn:
        """Gather the facts themselves for the message; omit them if some ranks do not answer."""
        mine = torch.frombuffer(bytearray(self._facts), dtype=torch.uint8)
        handle = self._transport.start(AllGather(mine, ragged=True), f"{self._name}.facts")
        begin = time.monotonic()
        while not handle.done() and time.monotonic() - begin < PATIENCE:
            nap(begin)
        if handle.done():
            agreement.check(bytes(handle.result().numpy()))
        raise DisagreementError(
            f"the ranks disagree on the {title}: use the same model and the same compression on all ranks"
        )
