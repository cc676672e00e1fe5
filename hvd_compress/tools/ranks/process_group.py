"""The default process group of `torch.distributed`, among the ranks that Horovod has started."""

from __future__ import annotations

import os
import socket

import horovod.torch as hvd
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # as torch.distributed exports it, but with a type


def begin() -> None:
    """Make the process group, over Gloo and the network that Horovod uses."""
    if interface := os.environ.get("HOROVOD_GLOO_IFACE"):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    host = socket.gethostbyname(os.environ.get("HOROVOD_HOSTNAME", "localhost"))
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if hvd.rank() == 0 else None
    host, port = hvd.broadcast_object((host, store.port if store else 0))
    dist.init_process_group("gloo", store=store or TCPStore(host, port), rank=hvd.rank(), world_size=hvd.size())
