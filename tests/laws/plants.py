"""Faults to plant: programs that find nothing must find these."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple


class Plant(NamedTuple):
    """A fault.

    Attributes:
        sow: Plants it in this process.
        adapter: Where it must be found.
    """

    sow: Callable[[], None]
    adapter: str


def discard() -> None:
    """A discard reaches the other models of the compressor."""
    compressor = import_module("hvd_compress.torch.compressor").ReducingCompressor
    compressor._owned = lambda self, owner: [one for one in self._sessions() if not one.waiting]


PLANTS = {"discard": Plant(discard, "threads")}
