"""Local steps over `torch.distributed`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hvd_compress.distributed.compression import Compression, DistributedCompressor
from hvd_compress.distributed.direct import Reduction
from hvd_compress.distributed.transport import GroupTransport
from hvd_compress.local.settings import LocalOptions, compressor, settings
from hvd_compress.local.stepper import LocalStepper
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
        **options: ``every``, ``compression``, ``outer``, ``fragments``, ``delay`` and ``mix``; see
            `hvd_compress.local.settings.LocalSettings`.

    Raises:
        SpecError: If an option is unknown or its value is not allowed.
        UnsupportedError: If the optimizer is not one of PyTorch, or there is no process group.
    """

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
        super().__init__(optimizer, chosen, compression, transport)

    def _start(self, arrays: Sequence[Tensor], name: str) -> Reduction:
        started = self._compression.all_reduce(arrays, name, op="mean", group=self.group(), async_op=True)
        assert isinstance(started, Reduction)
        return started

    def group(self) -> dist.ProcessGroup:
        """Return the process group of the ranks that average."""
        assert isinstance(self._transport, GroupTransport)
        group: dist.ProcessGroup = self._transport.group
        return group
