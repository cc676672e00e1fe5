"""Gossip over `torch.distributed`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack, cast

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hvd_compress.distributed.compression import Compression, DistributedCompressor
from hvd_compress.distributed.direct import Reduction
from hvd_compress.distributed.meeting import limit_of
from hvd_compress.distributed.transport import GroupTransport
from hvd_compress.local.gossip import GossipOptions, GossipSettings, GossipStepper
from hvd_compress.local.graph import Edge, Pairs
from hvd_compress.local.settings import compressor
from hvd_compress.torch.optimizer_stepper import OptimizerStepper


class Gossip(OptimizerStepper, GossipStepper):
    """Train with neighbours only: in each step, a rank's model approaches those of its neighbours in a graph.

    Use::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        gossip = Gossip(optimizer, "ring")
        for batch in batches:
            model(batch).backward()  # of the model itself: without DistributedDataParallel, or within a node only
            optimizer.step()  # gossips first
            optimizer.zero_grad()
        gossip.finish()

    By default it is PowerGossip (Vogels, Karimireddy, Jaggi, Practical Low-Rank Communication Compression in
    Decentralized Deep Learning, 2020): two neighbours send one vector for each matrix, in turns by its rows and its
    columns, which together approximate the difference of their models; vectors go as they are. With
    ``compression="none"`` it is D-PSGD (Lian et al., 2017), and with ``compression="topk:ratio=0.01,feedback=ef21"`` or
    any other method CHOCO-SGD (Koloskova, Stich, Jaggi, 2019).

    No rank waits for more than its neighbours, and no sum goes round all ranks. Models differ between ranks: evaluate
    within `averaged`, and end with `finish`. All ranks make as many steps.

    Make it on all ranks of the job together: those of a group go on with the parameters of its first one. Save the
    parameters and the optimizer of each rank, beside `save`; after it was made, load them and then its own state.

    Args:
        optimizer: The optimizer of the model on this rank, with any learning rate schedule.
        graph: ``"ring"``, ``"torus"``, ``"exponential"``, or pairs of ranks, counted within the group.
        group: The ranks that gossip; None for all. With FSDP2 or DistributedDataParallel within a node, those that
            have the same shards, or the same local rank.
        **options: ``rank``, ``iterations``, ``compression`` and ``step_size``; see
            `hvd_compress.local.gossip.GossipSettings`.

    Raises:
        SpecError: If an option is unknown or its value is not allowed.
        UnsupportedError: If the optimizer is not one of PyTorch, or there is no process group.
    """

    _transport: GroupTransport

    def __init__(
        self,
        optimizer: Optimizer,
        graph: str | Pairs = "ring",
        group: dist.ProcessGroup | None = None,
        **options: Unpack[GossipOptions],
    ) -> None:
        chosen = GossipSettings.of(graph, options)
        compression = compressor(chosen.method, Compression.parse, DistributedCompressor, "hvd_compress.distributed")
        transport = GroupTransport.of(group or compression._everyone())
        super().__init__(optimizer, chosen, compression, transport)
        self._pairs = self._connected()

    def _connected(self) -> dict[Edge, dist.ProcessGroup]:
        """Return a process group of the two ranks of each edge of this rank, with the time limit of the whole group.

        PyTorch names groups by their number, so all ranks of the job make those of all ranks.
        """
        mine = {(self._members[edge.low], self._members[edge.high]): edge for edge in self.edges}
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, list(mine))
        limit = limit_of(self.group())
        pairs = dict.fromkeys(pair for pairs in told for pair in pairs)
        groups = {pair: dist.new_group(list(pair), timeout=limit) for pair in pairs}
        return {edge: groups[pair] for pair, edge in mine.items() if edge in self._mine}

    def _start(self, arrays: Sequence[Tensor], edge: Edge) -> Reduction:
        name = f"{self._label}.{edge.low}.{edge.high}"
        started = self._compression.all_reduce(arrays, name, group=self._pairs[edge], async_op=True)
        assert isinstance(started, Reduction)
        return started

    def remove(self) -> None:
        """Do nothing in further steps of the optimizer, and close the connections to the neighbours."""
        super().remove()
        for pair in self._pairs.values():
            dist.destroy_process_group(pair)

    def group(self) -> dist.ProcessGroup:
        """Return the process group of the ranks that gossip."""
        return cast(dist.ProcessGroup, self._transport.group)
