"""Launch kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

TILE = 2048
"""Elements that a program takes where nothing else decides."""


def kernel(*varying: str) -> Callable[[Callable[..., Any]], Any]:
    """Make a function a kernel; what it is given for these names changes from call to call and is not compiled for."""
    return lambda function: triton.jit(function, do_not_specialize=list(varying))


def part(function: Callable[..., Any]) -> Any:
    """Let kernels call a function; it becomes part of them."""
    return triton.jit(function)


def launch(function: Any, programs: int, *args: Any, warps: int = 4, **constants: Any) -> None:
    """Run a kernel on the device of its first argument.

    Products and sums are not fused: elementwise results have the bits of the oracle.

    Args:
        function: The kernel.
        programs: How many programs; with none there is nothing to do.
        args: Of the kernel.
        warps: Of a program.
        constants: What the kernel is compiled for.
    """
    if programs:
        device = args[0].device
        with torch.cuda.device(device if device.type == "cuda" else -1):  # -1: Triton's interpreter, on the CPU
            function[(programs,)](*args, num_warps=warps, enable_fp_fusion=False, **constants)


def warps_for(elements: int) -> int:
    """Warps for a program that holds so many float32 at once: 16 or fewer for each thread."""
    return min(16, max(4, elements // 512))


def tiles(n: int, size: int = TILE) -> int:
    """Return how many tiles cover ``n`` elements."""
    return -(-n // size)


def flat(x: Tensor) -> Tensor:
    """The same elements one after another in memory, in one dimension."""
    return x.contiguous().reshape(-1)
