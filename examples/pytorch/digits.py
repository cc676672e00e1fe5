"""Train a small CNN on handwritten digits, with compressed gradients.

Run::

    horovodrun --gloo -np 2 python examples/pytorch/digits.py --compression topk:ratio=0.01
"""

import argparse
import json
import sys
import time
from statistics import median
from typing import Any

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hvd_compress.torch import Compression

parser = argparse.ArgumentParser()
parser.add_argument("--compression", default="topk:ratio=0.01", metavar="SPEC", help="default: %(default)s")
parser.add_argument("--lr", default=0.1, type=float, help="learning rate; default: %(default)s")
parser.add_argument("--momentum", default=0.8, type=float, help="of SGD; default: %(default)s")
parser.add_argument("--hidden", default=128, type=int, help="width of the hidden layer; default: %(default)s")
parser.add_argument("--epochs", default=10, type=int, help="default: %(default)s")
parser.add_argument("--report", metavar="FILE", help="also append what is printed to this file, as lines of JSON")
args = parser.parse_args()


def tell(**facts: Any) -> None:
    """Print facts on rank 0."""
    if hvd.rank() == 0:
        print(*(f"{name}={value}" for name, value in facts.items()), flush=True)
        if args.report:
            with open(args.report, "a") as report:
                report.write(json.dumps(facts) + "\n")


hvd.init()
torch.set_num_threads(1)
torch.manual_seed(hvd.rank())

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
x, test_x, y, test_y = train_test_split(images, torch.tensor(labels), train_size=1408, random_state=0)
share = slice(hvd.rank(), len(x) // hvd.size() * hvd.size(), hvd.size())  # as many images for each rank
batches = DataLoader(TensorDataset(x[share], y[share]), batch_size=32, shuffle=True)

model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(1024, args.hidden),
    nn.ReLU(),
    nn.Linear(args.hidden, 10),
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

# All that compression needs: this object, and to hand it to Horovod's optimizer.
compression = Compression.parse(args.compression)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)

cross_entropy = nn.CrossEntropyLoss()
seconds = []
for epoch in range(args.epochs):
    for x, y in batches:
        begin = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    tell(epoch=epoch + 1, accuracy=round(accuracy, 4))

weights = torch.cat([p.detach().flatten() for p in model.parameters()]).view(torch.int32)
equal = bool((hvd.allgather(weights[None]) == weights).all())
stats = compression.stats()
tell(
    accuracy=round(accuracy, 4),
    steps=stats.steps,
    bytes_per_step=round(stats.bytes_per_step),
    ratio=round(stats.ratio, 2),
    step_seconds=round(median(seconds[5:]), 4),
    ranks_equal=equal,
)
sys.exit(0 if equal else "the ranks ended with different weights")
