"""A rank, whatever the framework."""

from __future__ import annotations

from typing import Any


class Rank:
    """A rank.

    Attributes:
        rank: Its number.
        size: The world size.
        own_device: Whether the network device counts the traffic of this rank, and of no other.
    """

    def __init__(self, hvd: Any) -> None:
        hvd.init()
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self.own_device: bool = hvd.local_size() == 1 and hvd.size() > 1
