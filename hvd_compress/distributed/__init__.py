"""Gradient compression for `torch.distributed`: DistributedDataParallel over Gloo, NCCL or MPI.

Use::

    from hvd_compress.distributed import Compression

    model = DistributedDataParallel(model)
    compression = Compression.topk(ratio=0.01).register(model)
"""

from __future__ import annotations

from hvd_compress.errors import required

with required("hvd_compress.distributed", "PyTorch", "torch"):
    import torch
del torch

from hvd_compress.distributed.compression import Compression, DistributedCompressor, hook  # noqa: E402
from hvd_compress.distributed.full_state import FullState  # noqa: E402
from hvd_compress.distributed.gossip import Gossip  # noqa: E402
from hvd_compress.distributed.local_steps import LocalSteps  # noqa: E402
from hvd_compress.local.settings import Outer  # noqa: E402

__all__ = ["Compression", "DistributedCompressor", "FullState", "Gossip", "LocalSteps", "Outer", "hook"]
