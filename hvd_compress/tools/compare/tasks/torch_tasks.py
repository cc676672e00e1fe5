"""Images to classify, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_compress.tools.compare.tasks import data
from hvd_compress.tools.compare.tasks.classifying import Classifying
from hvd_compress.tools.compare.tasks.data import Arr
from hvd_compress.tools.compare.tasks.options import FashionOptions, NoOptions, read, share_of
from hvd_compress.tools.compare.training import Setting, Training

Batch = tuple[Tensor, Tensor]


def digits(setting: Setting) -> Training:
    """The CNN of ``examples/pytorch/digits.py``, 32 images in each step of a rank."""
    read(NoOptions, "digits", setting.options)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    lr = 0.1 if setting.lr is None else setting.lr
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.8 if setting.momentum else 0)
    task = _Classifying(data.digits(), setting, batch=32)
    return Training(model, optimizer, task.batches, loss, task.evaluate, target=0.95, epochs=8, every=10)


def fashion(setting: Setting) -> Training:
    """A CNN of 3.2 million parameters on Fashion-MNIST; see `FashionOptions`."""
    options = read(FashionOptions, "fashion", setting.options)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )
    lr = 0.05 if setting.lr is None else setting.lr
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9 if setting.momentum else 0)
    task = _Classifying(data.fashion(setting.data), setting, share_of(options.batch, setting), options.test)
    return Training(model, optimizer, task.batches, loss, task.evaluate, target=0.85, epochs=2, every=10)


class _Classifying(Classifying):
    """With tensors of PyTorch."""

    def tensor(self, array: Arr) -> Tensor:
        return torch.from_numpy(array)

    def inputs(self, pixels: Arr) -> Tensor:
        return self.tensor(pixels[:, None])

    def logits(self, model: nn.Module, inputs: Tensor) -> Arr:
        found: Arr = model(inputs).numpy()
        return found


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The cross entropy."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)
