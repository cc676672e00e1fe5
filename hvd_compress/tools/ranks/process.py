"""The device, the memory and the network traffic of this process."""

from __future__ import annotations

import os
from pathlib import Path

from hvd_compress.errors import UnsupportedError

_STATUS = Path("/proc/self/status")


def device_bytes(counter: str) -> int:
    """Return the bytes that have passed the network device that Gloo uses: ``"rx_bytes"`` or ``"tx_bytes"``."""
    name = os.environ.get("HOROVOD_GLOO_IFACE", "eth0")
    return int(Path(f"/sys/class/net/{name}/statistics/{counter}").read_text())


def own_device(kind: str, local_rank: int) -> str:
    """Return the device of a rank of this machine, such as ``"cuda:0"``; a GPU becomes PyTorch's current one.

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
    """Wait until a GPU has done what was asked of it, so that the time of it counts."""
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
