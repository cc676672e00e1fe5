"""A rank of `torch.distributed`, started by torchrun or, where Horovod is measured beside it, by horovodrun."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # as torch.distributed exports it, but with a type

from hvd_compress.tools.ranks.process import Device, own_device, settle

_BACKENDS: dict[Device, str] = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class GroupRank:
    """A rank; see `hvd_compress.tools.ranks.rank.Rank`."""

    def __init__(self, specs: Sequence[str], device: Device) -> None:
        begin = _begin if "LOCAL_WORLD_SIZE" in os.environ else partial(_begin_by_horovod, specs)
        self.device, local_rank, self.local_size = begin(device)
        self.rank: int = dist.get_rank()
        self.size: int = dist.get_world_size()
        self.reads_device: bool = local_rank == 0 and self.size > self.local_size

    def gather(self, values: list[float]) -> list[list[float]]:
        """Return the values of all ranks."""
        settle(self.device)
        found: list[list[float]] = [[]] * self.size
        dist.all_gather_object(found, values)
        return found

    def gather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks."""
        found = [""] * self.size
        dist.all_gather_object(found, text)
        return found


def _begin(device: Device) -> tuple[str, int, int]:
    """Make the process group; return the own device, the rank within the node and the number of ranks there."""
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    own = own_device(device, local_rank)
    dist.init_process_group(_BACKENDS[device])
    return own, local_rank, local_size


def _begin_by_horovod(specs: Sequence[str], device: Device) -> tuple[str, int, int]:
    """Make the process group of Horovod's ranks, over the network that Horovod uses; see `_begin`."""
    import horovod.torch as hvd

    from hvd_compress.tools.ranks.rank import Rank

    own = Rank(hvd, specs, device).device
    if interface := os.environ.get("HOROVOD_GLOO_IFACE"):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    host = socket.gethostbyname(os.environ.get("HOROVOD_HOSTNAME", "localhost"))
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if hvd.rank() == 0 else None
    host, port = hvd.broadcast_object((host, store.port if store else 0))
    store = store or TCPStore(host, port)
    dist.init_process_group(_BACKENDS[device], store=store, rank=hvd.rank(), world_size=hvd.size())
    return own, hvd.local_rank(), hvd.local_size()
