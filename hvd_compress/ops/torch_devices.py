"""Which primitives go with which device of PyTorch, and in which precision they compute."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from hvd_compress.ops.torch import TorchCpuOps, TorchOps


def torch_ops(device: torch.device | str) -> TorchOps:
    """The primitives for the arrays of a device.

    Raises:
        MissingPackageError: If it is a CUDA device and there is no Triton.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return TorchCpuOps()
    if kind == "cuda":
        from hvd_compress.ops.torch_cuda import TorchCudaOps  # Triton is needed on GPUs alone

        return TorchCudaOps(device)
    return TorchOps(device)


def exactly(device: torch.device) -> AbstractContextManager[object]:
    """Leave ``torch.autocast`` out: all ranks compute in the precision of their arrays, wherever they are called."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
