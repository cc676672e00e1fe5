"""Local steps over `torch.distributed`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack, cast

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.optim import Optimizer

from hvd_compress.distributed.compression import Compression, DistributedCompressor
from hvd_compress.distributed.direct import Reduction
from hvd_compress.distributed.meeting import limit_of
from hvd_compress.distributed.quorum import Meetings
from hvd_compress.distributed.transport import GroupTransport, store_of
from hvd_compress.errors import SpecError, UnsupportedError
from hvd_compress.local.settings import LocalOptions, compressor, settings
from hvd_compress.local.stepper import LocalStepper, Meeting, Stage
from hvd_compress.torch.optimizer_stepper import OptimizerStepper


class LocalSteps(OptimizerStepper, LocalStepper):
    """Train alone for some steps, then average: models travel every few steps, in place of gradients in each.

    Use::

        optimizer = torch.optim.AdamW(model.parameters())
        local = LocalSteps(optimizer, every=30, compression="ctk")
        for batch in batches:
            model(batch).backward()  # of the model itself: without DistributedDataParallel, or within a node only
            optimizer.step()
            optimizer.zero_grad()
        local.finish()

    With w_i the parameters of rank i, a those of the global model and C the compression, after every ``every`` steps::

        d = mean over the ranks of C(a - w_i)        a = a - outer(d)        w_i = a

    What a compression does not send is kept, and added to the next difference. With ``every=1``, SGD and the default
    ``outer`` it is data-parallel training. All ranks make the same number of steps; whether the loss is as good depends
    on ``every`` and on the learning rate, so compare both with your model.

    Make it on all ranks together: they go on with the parameters of the first one. Save the parameters and the
    optimizer of each rank, beside `save`; after it was made, load them and then its own state.

    Args:
        optimizer: The optimizer of the model on this rank, with any learning rate schedule.
        spec: ``"diloco"``, ``"streaming"`` or ``"sparseloco"``, published settings, over which options take precedence
            (`hvd_compress.local.settings.PRESETS`); or ``"sparseloco@50"`` or ``"qsgd:bits=4@30"``, with the steps.
        group: The ranks that average; None for all. With FSDP2 or DistributedDataParallel within a node, those that
            have the same shards, or the same local rank.
        **options: ``every``, ``compression``, ``outer``, ``fragments``, ``delay``, ``mix``, ``quorum`` and
            ``patience``; see `hvd_compress.local.settings.LocalSettings`.

    Raises:
        SpecError: If an option is unknown or its value is not allowed.
        UnsupportedError: If the optimizer is not one of PyTorch, or there is no process group.
    """

    _supports_quorum = True
    _transport: GroupTransport

    def __init__(
        self,
        optimizer: Optimizer,
        spec: str = "",
        group: dist.ProcessGroup | None = None,
        **options: Unpack[LocalOptions],
    ) -> None:
        chosen = settings(spec, options)
        compression = compressor(
            chosen.compression, Compression.parse, DistributedCompressor, "hvd_compress.distributed"
        )
        transport = GroupTransport.of(group or compression._everyone())
        if chosen.quorum is not None:
            _check_quorum(chosen.quorum, transport)
        super().__init__(optimizer, chosen, compression, transport)
        self._transports = {tuple(range(transport.world.size)): transport}
        self._meetings = None if chosen.quorum is None else self._made_meetings(chosen.quorum)

    def _made_meetings(self, quorum: int) -> Meetings:
        group, limit = self.group(), limit_of(self.group()).total_seconds()
        store = PrefixStore(f"hvd_compress.{self._label}.{self._job}", store_of(group))
        return Meetings(store, group.rank(), group.size(), quorum, self.settings.patience, limit)

    def _meet(self, stage: Stage) -> Meeting:
        return super()._meet(stage) if self._meetings is None else self._meetings.meet(stage, self.steps)

    def _among(self, ranks: Sequence[int]) -> GroupTransport:
        if (key := tuple(ranks)) not in self._transports:
            name = f"{self._label}.{self._job}." + ".".join(map(str, ranks))
            self._transports[key] = self._transport.among(ranks, name)
        return self._transports[key]

    def _start(self, arrays: Sequence[Tensor], name: str) -> Reduction:
        started: Reduction = self._compression._start(arrays, name, "mean", self._among(self._meeting.members))
        return started

    def group(self) -> dist.ProcessGroup:
        """Return the process group of the ranks that average."""
        return cast(dist.ProcessGroup, self._transport.group)


def _check_quorum(quorum: int, transport: GroupTransport) -> None:
    """Refuse a quorum that these ranks cannot have."""
    if quorum > transport.world.size:
        raise SpecError(f"quorum={quorum} is not allowed: there are {transport.world.size} ranks")
    if transport.world.size != dist.get_world_size():
        raise UnsupportedError(
            "quorum= is not supported with a group of some ranks only: the other ranks of a node could be late in other"
            " groups, and go on from another global model"
        )
    if not transport.over_gloo:
        raise UnsupportedError(
            "quorum= needs connections that some of the ranks can make alone, as Gloo's: pass"
            ' group=torch.distributed.new_group(backend="gloo")'
        )
