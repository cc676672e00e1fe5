"""Ranks of an exchange, as a Horovod process set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from hvd_compress.core.collectives import Collective, World
from hvd_compress.core.lowering import LACKS
from hvd_compress.errors import ExchangeError


@dataclass(frozen=True)
class Group:
    """Ranks that take part in an exchange.

    Attributes:
        process_set: Horovod's process set.
        world: Rank and size within the process set.
    """

    process_set: Any
    world: World

    missing = LACKS
    ordered = False

    @classmethod
    def of(cls, process_set: Any) -> Self:
        """Return the group of a process set that this process belongs to."""
        return cls(process_set, World(process_set.rank(), process_set.size()))

    def lanes(self, keys: Sequence[str]) -> Mapping[str, Self]:
        """Return this group for each bucket, as Horovod matches collectives by their names."""
        return dict.fromkeys(keys, self)

    def renewed(self) -> Self:
        """Return the current ranks; an elastic job may change them when Horovod restarts."""
        return self.of(self.process_set)

    @staticmethod
    def check_scope(message: Collective) -> None:
        """Reject a collective over a subset of the ranks.

        Raises:
            ExchangeError: If the scope is not ``"world"``.
        """
        if message.scope != "world":
            raise ExchangeError(f"{message.scope=} is not supported with Horovod: all ranks must take part")

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a member, which Horovod expects as the root of a broadcast."""
        ranks = self.process_set.ranks
        return int(ranks[rank]) if ranks is not None else rank
