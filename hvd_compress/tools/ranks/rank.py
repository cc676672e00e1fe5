"""A rank, whatever the framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_compress.engine.spec import parse
from hvd_compress.tools.ranks.process import Device, own_device
from hvd_compress.transport.groups import node_process_sets


class Rank:
    """A rank.

    Args:
        hvd: Horovod's module for the framework.
        specs: The methods of the job.
        device: ``"cpu"``, or ``"cuda"`` for a GPU of its own.

    Attributes:
        rank: Its number.
        size: The world size.
        device: Its device, such as ``"cuda:0"``.
        reads_device: Whether this rank reads the counters of the network device, for all ranks of its host.
    """

    def __init__(self, hvd: Any, specs: Sequence[str], device: Device) -> None:
        hvd.init(process_sets=node_process_sets() if any(parse(spec).hierarchical for spec in specs) else [])
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self.reads_device: bool = hvd.local_rank() == 0 and hvd.cross_size() > 1
        self.device: str = own_device(device, hvd.local_rank())
        self._hvd = hvd

    def gather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks."""
        found: list[str] = self._hvd.allgather_object(text)
        return found
