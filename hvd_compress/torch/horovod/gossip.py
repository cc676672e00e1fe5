"""Gossip over Horovod."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import horovod.torch as hvd
from torch import Tensor
from torch.optim import Optimizer

from hvd_compress.local.base import Over
from hvd_compress.local.gossip import GossipOptions, GossipSettings, GossipStepper
from hvd_compress.local.graph import Edge, Pairs
from hvd_compress.local.settings import compressor
from hvd_compress.torch.horovod import caller
from hvd_compress.torch.horovod.compression import Compression, TorchCompressor
from hvd_compress.torch.horovod.transport import HorovodTransport
from hvd_compress.torch.optimizer_stepper import OptimizerStepper


class Gossip(OptimizerStepper, GossipStepper):
    """Train with neighbours only; see `hvd_compress.distributed.Gossip`.

    The optimizer is that of PyTorch, without ``hvd.DistributedOptimizer``. Each edge is a process set of two ranks, so
    start Horovod by ``hvd.init(process_sets="dynamic")``. All ranks take part.

    Args:
        optimizer: The optimizer of the model on this rank.
        graph: ``"ring"``, ``"torus"``, ``"exponential"``, or pairs of ranks.
        **options: See `hvd_compress.local.gossip.GossipSettings`.

    Raises:
        SpecError: If an option is unknown or its value is not allowed.
        UnsupportedError: If the optimizer is not one of PyTorch, or Horovod was started without ``"dynamic"``.
    """

    def __init__(self, optimizer: Optimizer, graph: str | Pairs = "ring", **options: Unpack[GossipOptions]) -> None:
        chosen = GossipSettings.of(graph, options)
        compression = compressor(chosen.method, Compression.parse, TorchCompressor, "hvd_compress.torch")
        transport = HorovodTransport.of(caller.EVERYONE)
        super().__init__(optimizer, chosen, compression, transport)
        known = transport.known_sets()
        self._pairs = {edge: transport.set_of([*edge[:2]], known, "Gossip", "'dynamic'") for edge in self.edges}

    def _start(self, arrays: Sequence[Tensor], edge: Edge) -> Over:
        where = {"name": f"{self._label}.{edge.low}.{edge.high}", "process_set": self._pairs[edge]}
        return Over(hvd.grouped_allreduce(list(arrays), op=hvd.Sum, compression=self._compression, **where))
