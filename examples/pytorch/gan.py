"""Train a small GAN with DistributedDataParallel and compressed gradients: it learns points on a circle.

Each loss reaches both nets, so backward also reduces gradients of the net that is not trained then. They are cleared
without a step, and with ``optimizer=`` the compression undoes what their reduction has left in its residuals.

Run::

    torchrun --nproc-per-node 2 examples/pytorch/gan.py --compression topk:ratio=0.05
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.distributed import Compression

parser = argparse.ArgumentParser()
parser.add_argument("--compression", default="topk:ratio=0.05", metavar="SPEC", help="default: %(default)s")
parser.add_argument("--steps", default=400, type=int, help="default: %(default)s")
args = parser.parse_args()

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(dist.get_rank())


def net(outputs: int) -> DistributedDataParallel:
    """Return a network for points in the plane."""
    layers = nn.Linear(2, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, outputs)
    return DistributedDataParallel(nn.Sequential(*layers))


def circle(count: int) -> Tensor:
    """Return points on the unit circle."""
    angle = torch.rand(count, 1) * 2 * torch.pi
    return torch.cat([angle.cos(), angle.sin()], 1)


generator, discriminator = net(2), net(1)
make = torch.optim.SGD(generator.parameters(), lr=0.05)
judge = torch.optim.SGD(discriminator.parameters(), lr=0.1)
compression = Compression.parse(args.compression)  # one for both nets
compression.register(generator, optimizer=make)
compression.register(discriminator, optimizer=judge)

for _ in range(args.steps):
    discriminator.zero_grad()
    losses = softplus(discriminator(generator(torch.randn(64, 2)))) + softplus(-discriminator(circle(64)))
    torch.autograd.backward(losses.mean())  # also gives the generator gradients, which nobody applies
    judge.step()

    generator.zero_grad()
    losses = softplus(-discriminator(generator(torch.randn(64, 2))))
    torch.autograd.backward(losses.mean())  # and this the discriminator
    make.step()

if dist.get_rank() == 0:
    radius = generator.module(torch.randn(1000, 2)).norm(dim=1).mean().item()
    print(f"radius={radius:.3f} ratio={compression.stats().ratio:.1f}", flush=True)
dist.barrier()
dist.destroy_process_group()
