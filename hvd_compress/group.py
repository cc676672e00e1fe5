"""The ranks of an exchange, as Horovod knows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from hvd_compress.core.collectives import Collective, World
from hvd_compress.core.lowering import LACKS
from hvd_compress.errors import ExchangeError


@dataclass(frozen=True)
class Group:
    """The ranks that take part in an exchange.

    Attributes:
        process_set: Horovod's process set.
        world: This process and the number of processes, within the set.
    """

    process_set: Any
    world: World

    missing = LACKS
    ordered = False

    @classmethod
    def of(cls, process_set: Any) -> Self:
        """Return the group of a process set that this process belongs to."""
        return cls(process_set, World(process_set.rank(), process_set.size()))

    def renewed(self) -> Self:
        """Return the ranks of now: in an elastic job, others than before Horovod was started anew."""
        return self.of(self.process_set)

    @staticmethod
    def check_scope(message: Collective) -> None:
        """Refuse a collective of some of the ranks.

        Raises:
            ExchangeError: If it is one.
        """
        if message.scope != "world":
            raise ExchangeError(f"{message.scope=} is not possible with Horovod: all ranks have to take part")

    def global_rank(self, rank: int) -> int:
        """Horovod's rank of a member: collectives of a process set name their root so."""
        ranks = self.process_set.ranks
        return int(ranks[rank]) if ranks is not None else rank
