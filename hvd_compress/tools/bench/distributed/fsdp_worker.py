"""A rank of a measurement with FSDP2; started as those of `ddp_worker`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hvd_compress.distributed import Compression
from hvd_compress.tools.bench.distributed.ddp_worker import DDPBench, DDPSubject, Model
from hvd_compress.tools.bench.distributed.measuring import measure
from hvd_compress.tools.bench.distributed.task import Entry, Task
from hvd_compress.tools.bench.distributed.torch_models import RATE, Loss, ModelSubject, Tensor

HALF = torch.bfloat16


class ShardedModel(Model):
    """A loss as a module that computes in float32, whatever the dtype in which its parameters are gathered."""

    def forward(self) -> Tensor:
        return self._loss([parameter.float() for parameter in self._all])


class FSDPBench(DDPBench):
    def _wrapped(self, entry: Entry, parameters: Sequence[Tensor], loss: Loss) -> ModelSubject:
        module = ShardedModel(parameters, loss)
        shape = (self.size // self.local_size, self.local_size) if entry.replicas else (self.size,)
        mesh = init_device_mesh(self.device.split(":")[0], shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        fully_shard(module, mesh=mesh, mp_policy=_precision(entry))
        optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
        subject = DDPSubject(list(module.parameters()), lambda _: module(), optimizer)
        if not entry.own:
            ours = entry.compression(Compression, None)
            subject.compressor = ours.register(module, optimizer=optimizer, gather=entry.gather)
        return subject


def _precision(entry: Entry) -> MixedPrecisionPolicy:
    """Gather parameters in 16 bits, unless the entry is without compression; reduce in 16 bits only for ``bf16``."""
    if entry.own and entry.spec == "none":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=HALF if entry.own else torch.float32)


if __name__ == "__main__":
    measure(Task.from_json(sys.argv[1]), FSDPBench)
