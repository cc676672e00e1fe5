"""Images to classify, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_compress.tools.compare.tasks.classifying import Batch, Classifying
from hvd_compress.tools.compare.tasks.data import Arr


def cnn(side: int, pools: tuple[bool, bool], hidden: int) -> nn.Sequential:
    """Return a CNN for grey images of ten classes; ``pools`` tells after which convolutions it halves the side."""
    layers: list[nn.Module] = []
    for inputs, outputs, pool in ((1, 32, pools[0]), (32, 64, pools[1])):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), *([nn.MaxPool2d(2)] if pool else [])]
        side //= 1 + pool
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * side**2, hidden), nn.ReLU(), nn.Linear(hidden, 10))


class _Classifying(Classifying):
    def cnn(self, side: int, pools: tuple[bool, bool], hidden: int) -> nn.Module:
        return cnn(side, pools, hidden)

    def sgd(self, model: nn.Module, lr: float, momentum: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels)

    def tensor(self, array: Arr) -> Tensor:
        return torch.from_numpy(array).to(self.setting.device)

    def inputs(self, pixels: Arr) -> Tensor:
        return self.tensor(pixels[:, None])

    def logits(self, model: nn.Module, inputs: Tensor) -> Arr:
        found: Arr = model(inputs).cpu().numpy()
        return found


digits, fashion = _Classifying.digits, _Classifying.fashion
