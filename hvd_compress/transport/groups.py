"""Ranks of an exchange, as a Horovod process set."""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from hvd_compress.core.collectives import Scope, World
from hvd_compress.errors import DisagreementError, UnsupportedError
from hvd_compress.transport.lowering import LACKS
from hvd_compress.transport.nodes import placed

_SCOPES: tuple[Scope, Scope] = ("node", "across")

_PATIENCE = 120.0
"""Seconds in which all ranks have called `node_process_sets`."""

_SETS: dict[Scope, Any] = {}
"""Process sets of this rank within its node and across nodes."""


def node_process_sets() -> list[Any] | str:
    """Return the process sets that ``hierarchical=on`` needs, for ``hvd.init(process_sets=node_process_sets())``.

    horovodrun with Gloo tells the nodes of the ranks before Horovod starts. For others, Horovod adds the process sets
    later, which costs an exchange of all ranks in each of its cycles.

    Call it on all ranks.

    Returns:
        An ``hvd.ProcessSet`` for each node, and one for the ranks of equal local rank on all nodes; none if all ranks
        are on one node or on nodes of their own, or if nodes have different numbers of ranks. With other launchers,
        ``"dynamic"``.

    Raises:
        DisagreementError: If another rank does not call it.
    """
    from horovod.common.process_sets import ProcessSet

    numbers = [f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    server = [f"HOROVOD_GLOO_RENDEZVOUS_{name}" for name in ("ADDR", "PORT")]
    if not os.environ.keys() >= {*numbers, *server}:
        return "dynamic"
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in numbers)
    store = _Store("{}:{}".format(*(os.environ[name] for name in server)))
    store.put(f"rank.{rank}", f"{local_rank} of {local_size}")
    world = placed(range(size), rank, local_rank, local_size)
    firsts = range(0, size, local_size)
    # Where the first ranks of all nodes are on nodes of this size, each rank finds so; a rank alone cannot tell.
    if world.local_size in (1, size) or any(store.get(f"rank.{one}") != f"0 of {local_size}" for one in firsts):
        return []
    return [ProcessSet(list(ranks)) for scope in _SCOPES for ranks in world.partition(scope)]


class _Store:
    """The store of horovodrun, by which the ranks meet.

    Args:
        address: Host and port.
    """

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/hvd_compress.nodes"
        self._open = build_opener(ProxyHandler({})).open

    def put(self, key: str, value: str) -> None:
        """Set a value."""
        self._open(Request(f"{self._url}/{key}", value.encode(), method="PUT"))

    def get(self, key: str) -> str:
        """Wait for a value and return it."""
        begin = time.monotonic()
        while time.monotonic() - begin < _PATIENCE:
            try:
                with self._open(f"{self._url}/{key}") as reply:
                    return str(reply.read().decode())
            except HTTPError:  # it is not there yet
                time.sleep(0.05)
        raise DisagreementError(
            f"{key.replace('.', ' ')} has not called node_process_sets() within {_PATIENCE:.0f} s: call it on all ranks"
        )


@dataclass(frozen=True)
class HorovodGroup:
    """Ranks that take part in an exchange.

    Attributes:
        process_set: Horovod's process set.
        world: Rank and size within the process set, and the nodes of the ranks.
        library: Horovod's module for the framework.
    """

    process_set: Any
    world: World

    library: ClassVar[Any]
    missing = LACKS
    ordered = False

    @classmethod
    def of(cls, process_set: Any) -> Self:
        """Return the group of a process set that this process belongs to."""
        hvd = cls.library
        ranks = range(hvd.size()) if process_set.ranks is None else process_set.ranks
        return cls(process_set, placed(ranks, hvd.rank(), hvd.local_rank(), hvd.local_size()))

    @property
    def epoch(self) -> Hashable:
        """Identifier of the process set and, where it matters, of the start of Horovod."""
        number: Hashable = self.process_set.process_set_id
        return number

    @property
    def members(self) -> Sequence[int]:
        """The ranks of the process set; empty for all ranks."""
        return tuple(self.process_set.ranks or ())

    def channels(self, keys: Sequence[str]) -> Mapping[str, Self]:
        """Return this group for each bucket, as Horovod matches collectives by their names."""
        return dict.fromkeys(keys, self)

    def renewed(self) -> Self:
        """Return the current ranks; an elastic job may change them when Horovod restarts."""
        return self.of(self.process_set)

    def within(self, scope: Scope) -> Self:
        """Return the ranks of a scope; other than ``"world"`` only after `connect`."""
        if scope == "world":
            return self
        return replace(self, process_set=_SETS[scope], world=self.world.within(scope))

    def connect(self) -> None:
        """Find the process sets within nodes and across nodes, or create them. All ranks call it at the same time.

        Raises:
            UnsupportedError: If Horovod was started without process sets, or this group is not that of all ranks.
        """
        if not self.world.multilevel:
            return
        if self.process_set.process_set_id != 0:
            raise UnsupportedError(
                "hierarchical=on is supported for process sets with one rank per node and for all ranks, but not for"
                " other process sets: leave out hierarchical=on, or process_set="
            )
        known = self.known_sets()
        for scope in _SCOPES:
            for ranks in self.world.partition(scope):
                found = self.set_of(list(ranks), known, "hierarchical=on", "hvd_compress.node_process_sets()")
                if self.world.rank in ranks:
                    _SETS[scope] = found

    def known_sets(self) -> Mapping[int, Sequence[int]]:
        """Return the ranks of all process sets, by their numbers."""
        known: Mapping[int, Sequence[int]] = self.library.mpi_ops._basics._get_process_set_ids_and_ranks()
        return known

    def set_of(self, ranks: list[int], known: Mapping[int, Sequence[int]], what: str, start: str) -> Any:
        """Return the process set of some ranks; create it if there is none. All ranks call it in the same order.

        Args:
            ranks: The ranks.
            known: Process sets that exist on all ranks.
            what: What needs it, for the error.
            start: Process sets with which to start Horovod, for the error.

        Raises:
            UnsupportedError: If Horovod was started so that none can be created.
        """
        for number, members in known.items():
            if list(members) == ranks:
                found = self.library.ProcessSet(ranks)
                found.process_set_id = number
                return found
        try:
            return self.library.add_process_set(ranks)
        except ValueError as error:
            raise UnsupportedError(
                f"{what} needs process sets of Horovod: start it by hvd.init(process_sets={start})"
            ) from error

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a member, which Horovod expects as the root of a broadcast."""
        ranks = self.process_set.ranks
        return int(ranks[rank]) if ranks is not None else rank
