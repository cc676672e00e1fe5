"""Linear methods, whose payload is the gradient's own allreduce: no carrier, no copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllReduce, Drive, World
from hvd_compress.core.method import Method
from hvd_compress.engine.stats import Meter
from hvd_compress.ops.torch_devices import torch_ops
from hvd_compress.torch.handshake import Handshake


class Passthrough:
    """Compress each tensor individually with a linear method.

    Args:
        method: A linear method.
        meter: Counters of bytes and time.
    """

    def __init__(self, method: Method, meter: Meter) -> None:
        self._method = method
        self._meter = meter
        self._handshakes: list[Handshake] = []

    def greet(self, handshake: Handshake) -> None:
        """Add a handshake, to be verified when the other ranks have arrived."""
        self._handshakes.append(handshake)

    def verify(self, patience: float = 0.0, sleep: Callable[[float], object] = time.sleep) -> None:
        """Verify the handshakes in which all ranks have arrived after ``patience`` seconds.

        Raises:
            DisagreementError: If the ranks disagree.
        """
        come = [handshake for handshake in self._handshakes if handshake.wait(patience, sleep)]
        self._handshakes = [handshake for handshake in self._handshakes if handshake not in come]
        for handshake in come:
            handshake.verify()

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
        self.verify()
        with self._meter.time("decode"):
            drive.resume(tensor)
            total: Tensor = drive.ended.total
            return total
