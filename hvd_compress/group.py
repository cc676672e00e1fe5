"""The ranks of an exchange, as Horovod knows them."""

from __future__ import annotations

from typing import Any, NamedTuple

from hvd_compress.collectives import World


class Group(NamedTuple):
    """The ranks that take part in an exchange.

    Attributes:
        process_set: Horovod's process set.
        world: This process and the number of processes, within the set.
    """

    process_set: Any
    world: World

    @classmethod
    def of(cls, process_set: Any) -> Group:
        """The group of a process set that this process belongs to."""
        return cls(process_set, World(process_set.rank(), process_set.size()))

    def global_rank(self, rank: int) -> int:
        """Horovod's rank of a member: collectives of a process set name their root so."""
        ranks = self.process_set.ranks
        return int(ranks[rank]) if ranks is not None else rank
