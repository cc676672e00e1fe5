"""Train a small network on handwritten digits with DistributedDataParallel and compressed gradients, without Horovod.

Run::

    torchrun --nproc-per-node 2 examples/pytorch/ddp_digits.py --compression powersgd:rank=4
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from hvd_compress.distributed import Compression

parser = argparse.ArgumentParser()
parser.add_argument("--compression", default="powersgd:rank=4", metavar="SPEC", help="default: %(default)s")
parser.add_argument("--epochs", default=10, type=int, help="default: %(default)s")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(rank)

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32) / 16
x, test_x, y, test_y = train_test_split(images, torch.tensor(labels), train_size=1408, random_state=0)
share = slice(rank, len(x) // size * size, size)  # as many images for each rank
batches = DataLoader(TensorDataset(x[share], y[share]), batch_size=32, shuffle=True)

# DistributedDataParallel gives all ranks the weights of rank 0; compression needs one line.
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
compression = Compression.parse(args.compression).register(model)

optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
for _ in range(args.epochs):
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

if rank == 0:
    accuracy = (model.module(test_x).argmax(1) == test_y).float().mean().item()
    print(f"accuracy={accuracy:.3f} ratio={compression.stats().ratio:.1f}", flush=True)
dist.barrier()
dist.destroy_process_group()
