"""One rank of a job that compares what the library says it sends with what the network device counts (PyTorch)."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import horovod.torch as hvd
import torch
from torch import nn
from wire.gradients import LARGE, SMALL, STEPS, gradient

from hvd_compress.core.collectives import Collective
from hvd_compress.torch import Compression
from hvd_compress.torch.horovod.transport import HorovodTransport
from hvd_compress.transport.protocol import Handle


def counter() -> int:
    """Bytes that the loopback device has sent so far, read at a time when no rank exchanges gradients."""
    hvd.barrier()
    found = re.search(r"^ *lo:((?: +\d+)+)", Path("/proc/self/net/dev").read_text(), re.MULTILINE)
    hvd.barrier()
    assert found
    return int(found[1].split()[8])


START = HorovodTransport.start


class Job:
    """A model of one weight, trained on gradients that are known beforehand."""

    def __init__(self, spec: str, shape: tuple[int, int]) -> None:
        self.compression: Any = Compression.parse(spec)
        self.model = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(shape))})
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.0),
            named_parameters=self.model.named_parameters(),
            compression=self.compression,
        )
        self.gradients = [torch.from_numpy(gradient(shape, hvd.rank(), step)) for step in range(STEPS)]
        self.messages: list[tuple[str, int]] = []

    def run(self) -> None:
        """Make a step with each gradient."""
        for grad in self.gradients:
            (self.model["weight"] * grad).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def start(self, transport: HorovodTransport, message: Collective, name: str) -> Handle:
        """Stand in for the transport's function of this name, and write down what buckets send."""
        if re.search(r"\.b\d+\.\d+$", name):
            self.messages.append((type(message).__name__, message.array.nbytes))
        return START(transport, message, name)

    def measure(self) -> dict[str, Any]:
        """The bytes of all steps: by the device, by messages and by ``stats``."""
        begin, before = time.perf_counter(), counter()
        start = lambda transport, message, name: self.start(transport, message, name)  # noqa: E731
        with patch.object(HorovodTransport, "start", start):
            self.run()
        device, seconds = counter() - before, time.perf_counter() - begin
        said = self.compression.stats().bytes_sent
        linear = self.compression.method.linear
        if linear:  # no messages: the payload travels as the gradient's own allreduce
            self.messages.append(("AllReduce", said))
        messages = hvd.allgather_object(self.messages)
        return {"device": device, "seconds": seconds, "messages": messages, "said": said, "linear": linear}


def idle() -> float:
    """Bytes per second that Horovod's coordination takes while there is nothing to do."""
    begin, before = time.perf_counter(), counter()
    time.sleep(0.5)
    return (counter() - before) / (time.perf_counter() - begin)


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    Job("none", SMALL).run()  # the first step of all takes long: PyTorch imports half of itself
    specs = {spec: {"small": Job(spec, SMALL).measure(), "large": Job(spec, LARGE).measure()} for spec in sys.argv[2:]}
    report = {"specs": specs, "idle": idle()}
    if hvd.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(report))
