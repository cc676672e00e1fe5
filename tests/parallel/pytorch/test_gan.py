"""A GAN whose losses reach both nets: the gradients of the other net are reduced, and cleared without a step."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch
from parallel.pytorch.training import assert_ranks_equal
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hvd_compress.distributed
import hvd_compress.torch

pytestmark = pytest.mark.usefixtures("process_group")

SPECS = ["topk:ratio=0.01,min_size=0", "powersgd:rank=2,min_size=0"]


class Gan:
    """Both nets, their optimizers, and one compressor for both.

    Args:
        adapter: ``"ddp"`` or ``"horovod"``.
        spec: Of the compression.
        foreign: Whether each loss reaches both nets.
    """

    def __init__(self, adapter: str, spec: str, foreign: bool) -> None:
        self.adapter, self.foreign = adapter, foreign
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.modules = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, n)) for n in (16, 1)]
        self.nets: list[nn.Module] = list(self.modules)
        self.optimizers: list[Any] = [torch.optim.SGD(net.parameters(), lr=0.1) for net in self.modules]
        if adapter == "ddp":
            compression = hvd_compress.distributed.Compression.parse(spec)
            self.nets = [DistributedDataParallel(net) for net in self.modules]
            for net, optimizer in zip(self.nets, self.optimizers, strict=True):
                compression.register(net, optimizer=optimizer)
        else:
            shared = hvd_compress.torch.Compression.parse(spec)
            self.optimizers = [
                hvd.DistributedOptimizer(one, net.named_parameters(prefix=str(i)), compression=shared)
                for i, (one, net) in enumerate(zip(self.optimizers, self.modules, strict=True))
            ]

    def step(self, trained: int, loss: Tensor) -> None:
        """Train one net by a loss."""
        loss.backward()  # type: ignore[no-untyped-call]
        if self.adapter == "ddp":
            self.optimizers[trained].step()
            return
        for optimizer in self.optimizers if self.foreign else [self.optimizers[trained]]:
            optimizer.synchronize()
        with self.optimizers[trained].skip_synchronize():
            self.optimizers[trained].step()

    def run(self, steps: int) -> Tensor:
        """Train both nets, and return all weights."""
        make, judge = self.nets if self.foreign else self.modules
        for step in range(steps):
            generator = torch.Generator().manual_seed(10 * step + hvd.rank())
            real, noise = torch.randn(2, 8, 16, generator=generator)
            for net in self.modules:
                net.zero_grad()
            fake = self.nets[0](noise) if self.foreign else make(noise).detach()
            self.step(1, (self.nets[1](fake) - self.nets[1](real + 1)).mean())
            for net in self.modules:
                net.zero_grad()
            self.modules[1].requires_grad_(self.foreign)
            self.step(0, -judge(self.nets[0](noise)).mean())
            self.modules[1].requires_grad_(True)
        return torch.cat([p.detach().flatten() for net in self.modules for p in net.parameters()])


@pytest.mark.parametrize("adapter", ["ddp", "horovod"])
@pytest.mark.parametrize("spec", SPECS)
def test_gradients_of_the_other_net_leave_no_trace(spec: str, adapter: str) -> None:
    weights = Gan(adapter, spec, foreign=True).run(10)
    torch.testing.assert_close(weights, Gan(adapter, spec, foreign=False).run(10), rtol=1e-5, atol=1e-7)
    assert_ranks_equal(weights)


def test_they_are_told_of_once_where_the_optimizer_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    net = DistributedDataParallel(nn.Linear(16, 4))
    hvd_compress.distributed.Compression.topk(ratio=0.1, min_size=0).register(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for thrown_away in (False, False, True, True, True):
        optimizer.zero_grad()
        for _ in range(2):  # accumulates
            net(torch.ones(2, 16)).sum().backward()
        if not thrown_away:
            optimizer.step()
    assert [one.count("as in a GAN") for one in caplog.messages] == [1] * (hvd.rank() == 0)
