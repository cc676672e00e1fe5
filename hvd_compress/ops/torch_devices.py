"""Choose the PyTorch primitives of a device, and disable autocast for them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from hvd_compress.ops.torch import TorchCpuOps, TorchOps


def torch_ops(device: torch.device | str) -> TorchOps:
    """Return the primitives for tensors on a device.

    Raises:
        MissingPackageError: If it is a CUDA device and Triton is not installed.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return TorchCpuOps()
    if kind == "cuda":
        from hvd_compress.ops.torch_cuda import TorchCudaOps  # imported here, as only GPUs need Triton

        return TorchCudaOps(device)
    return TorchOps(device)


def exactly(device: torch.device) -> AbstractContextManager[object]:
    """Disable ``torch.autocast``, so that all ranks compute in the dtypes of their tensors."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
