"""Linear methods, whose payload is the gradient's own allreduce: no placeholder, no copy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllReduce, Drive, World
from hvd_compress.core.method import Method
from hvd_compress.engine.stats import Meter
from hvd_compress.ops.torch_devices import torch_ops


class Passthrough:
    """Compress each tensor individually with a linear method.

    Args:
        method: A linear method.
        meter: Counters of bytes and time.
    """

    def __init__(self, method: Method, meter: Meter) -> None:
        self._method = method
        self._meter = meter

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor that Horovod is to allreduce, and the context for `decompress`."""
        with self._meter.time("encode"):
            bucket = Bucket("", (tuple(tensor.shape),), str(tensor.dtype).removeprefix("torch."))
            exchanging = self._method.exchange(torch_ops(tensor.device), bucket, tensor, (), World(0, 1))
            drive = Drive(exchanging)
            message = drive.message
            assert isinstance(message, AllReduce)
        self._meter.gradient_bytes += tensor.numel() * tensor.element_size()
        self._meter.bytes_sent += message.array.numel() * message.array.element_size()
        return message.array, drive

    def decompress(self, tensor: Tensor, drive: Drive[Any]) -> Tensor:
        """Return the reduced gradient."""
        with self._meter.time("decode"):
            drive.resume(tensor)
            total: Tensor = drive.ended.total
            return total
