"""Train on handwritten digits with compressed gradients, while ranks come and go.

Run, with a script that prints the hosts there are now, one ``name:slots`` a line::

    horovodrun --gloo -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh python examples/pytorch/elastic.py

While there is one host only, Horovod waits for a second before it begins, unless told ``--network-interfaces lo``.
"""

import argparse
from typing import Any

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from hvd_compress.torch import Compression

parser = argparse.ArgumentParser()
parser.add_argument("--compression", default="topk:ratio=0.01", metavar="SPEC", help="default: %(default)s")
parser.add_argument("--epochs", default=10, type=int, help="default: %(default)s")
parser.add_argument("--batch", default=32, type=int, help="images of each rank; default: %(default)s")
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
x, test_x, y, test_y = train_test_split(images, torch.tensor(labels), train_size=1408, random_state=0)

model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 128), nn.ReLU()
)
model.append(nn.Linear(128, 10))
compression = Compression.parse(args.compression)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)


@hvd.elastic.run
def train(state: Any) -> None:
    """Called anew whenever the ranks change; compression keeps what it can, and the state has the rest."""
    while state.epoch < args.epochs:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(state.epoch))
        steps = len(x) // (args.batch * hvd.size())
        for step in range(state.step, steps):
            mine = order[step * args.batch * hvd.size() :][hvd.rank() * args.batch :][: args.batch]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
            optimizer.step()
            state.step = step + 1
            if state.step % 10 == 0:
                state.commit()  # what all go back to when one is lost
        state.epoch, state.step = state.epoch + 1, 0
        state.commit()
        if hvd.rank() == 0:
            accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
            print(f"epoch={state.epoch} ranks={hvd.size()} accuracy={accuracy:.4f}", flush=True)


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, step=0))
if hvd.rank() == 0:
    print(compression.stats())
