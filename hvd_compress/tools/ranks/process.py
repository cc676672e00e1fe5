"""Device, memory, network traffic and errors of the process of a rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from hvd_compress.errors import CompressionError, UnsupportedError

Device = Literal["cpu", "cuda"]
"""Type of the devices of all ranks; with ``"cuda"``, each rank has its own GPU."""

_STATUS = Path("/proc/self/status")


def device_bytes(counter: str) -> int:
    """Return the bytes that have passed the network device that Gloo uses: ``"rx_bytes"`` or ``"tx_bytes"``."""
    name = os.environ.get("HOROVOD_GLOO_IFACE", "eth0")
    return int(Path(f"/sys/class/net/{name}/statistics/{counter}").read_text())


@contextmanager
def refusals() -> Iterator[None]:
    """Exit with one line on stderr if an error of this package is raised in the block."""
    try:
        yield
    except CompressionError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def own_device(kind: Device, local_rank: int) -> str:
    """Return the device of a rank, such as ``"cuda:0"``; a GPU becomes PyTorch's current device.

    Raises:
        UnsupportedError: If there is no GPU for this rank.
    """
    if kind == "cpu":
        return kind
    import torch

    if local_rank >= (count := torch.cuda.device_count()):
        raise UnsupportedError(
            f"--device cuda needs a GPU for each rank, and PyTorch sees {count} on this machine: take at most as many"
            " ranks, or --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return f"cuda:{local_rank}"


def settle(device: str) -> None:
    """Wait for all kernels of a GPU, so that a clock includes them."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def forget_peak(device: str) -> None:
    """Let the high-water mark of memory start anew."""
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")
    else:
        import torch

        torch.cuda.reset_peak_memory_stats(device)


def peak(device: str) -> int:
    """Return the most memory that this process has had in use on its device, in bytes."""
    if device != "cpu":
        import torch

        return torch.cuda.max_memory_allocated(device)
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
