"""GPUs: their bandwidths, and what compression takes on one."""

from __future__ import annotations

from typing import NamedTuple

from hvd_compress.tools.advise.rates import Rate


class Gpu(NamedTuple):
    """Bandwidths of a GPU by its data sheet, in bytes per second.

    Attributes:
        memory: Reads and writes of its memory.
        bus: To the other GPUs of its node, in one direction.
    """

    memory: float
    bus: float


GPUS = {
    "p40": Gpu(346e9, 15.8e9),
    "p100": Gpu(732e9, 15.8e9),
    "t4": Gpu(320e9, 15.8e9),
    "v100": Gpu(900e9, 150e9),
    "rtx2080ti": Gpu(616e9, 15.8e9),
    "a40": Gpu(696e9, 31.5e9),
    "a100": Gpu(2039e9, 300e9),
    "h100": Gpu(3350e9, 450e9),
    "h200": Gpu(4800e9, 450e9),
}
"""By name: V100, A100 with 80 GB, H100 and H200 as modules with NVLink; A40 on PCIe 4.0, the others on PCIe 3.0."""

REACHED = 0.8
"""Share of these that programs reach: a copy on an H200 3.85 of 4.8 TB/s, an allreduce of NCCL on eight A100 240 of 300
GB/s."""

KERNELS = {
    "bf16": Rate(3.0, 0.0, 1.1),
    "fp8": Rate(1.9, 0.0, 2.9),
    "block8": Rate(5.1, 0.0, 2.1),
    "qsgd": Rate(1.6, 0.0, 2.2),
    "efsignsgd": Rate(1.6, 0.0, 2.0),
    "ctk": Rate(12.8, 0.0, 0.7),
    "topk": Rate(12.3, 0.5, 0.3),
    "powersgd": Rate(2.6, 1.3, 0.0),
}
"""Cost of the kernels of a method in copies of the gradient, besides `FILL`, measured on an H200: docs/performance.md,
On a GPU. That of powersgd is two products to encode and one to decode. Decoding of topk is that of a processor."""

FILL = 1.9
"""Copies that it takes to add gradients and residual, and to check them for inf and nan."""

HOST = {"none": 0, "fp16": 1, "int8": 26, "topkc": 35, "qsgd": 47, "efsignsgd": 48, "topk": 58, "powersgd": 90}
"""Milliseconds by which the 161 gradients of ResNet-50 lengthen a step on an H200, mostly on the host, which launches
kernels: docs/performance.md, On a GPU."""

_GRADIENTS = 161


def host_seconds(name: str) -> float:
    """Return the seconds of a step that each gradient costs on the host; for methods not measured those of qsgd.

    Args:
        name: The method.
    """
    return HOST.get(name, HOST["qsgd"]) / 1000 / _GRADIENTS


def gpu_rate(name: str, grows: bool, copy: float) -> Rate:
    """Return the cost of a method on a GPU.

    Args:
        name: One of `KERNELS`.
        grows: Whether what a rank decodes grows with the number of ranks.
        copy: Seconds per parameter of a copy.
    """
    encode, decode, each = KERNELS[name]
    if not grows:  # a rank decodes its part of all payloads, and then all parts of the sum
        decode, each = decode + 2 * each, 0.0
    return Rate(copy * (FILL + encode), copy * decode, copy * each)
