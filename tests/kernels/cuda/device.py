"""Where the kernels run: on a GPU, or with TRITON_INTERPRET=1 on the CPU."""

from __future__ import annotations

import os
from typing import Any

import numpy.typing as npt
import torch

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

# So that no kernel is left to what PyTorch takes where nothing is said: a program may have changed that.
torch.set_default_dtype(torch.bfloat16)
torch.set_default_device("meta")


def put(x: npt.NDArray[Any]) -> torch.Tensor:
    """A copy of an array on the device."""
    return torch.tensor(x, device=DEVICE)


def get(x: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor as an array."""
    array: npt.NDArray[Any] = x.cpu().numpy()
    return array
