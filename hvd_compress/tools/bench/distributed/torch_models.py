"""The models of measurements in PyTorch, whatever reduces their gradients.

All entries share the weights, as views, so that many of them fit into memory, and so do the gradients of ``exchange``:
before each step they are written anew, which is not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from hvd_compress.engine.stats import Stats
from hvd_compress.ops.arrays import Shape
from hvd_compress.tools.bench.distributed.shapes import BLOCKS, CLASSES, NARROW, SHAPES, WIDTH
from hvd_compress.tools.ranks.process import settle

Tensor = Any
Loss = Callable[[Sequence[Any]], Any]

BATCH = 32
IMAGES, SIDE = 4, 64
"""ResNet-50's batch: few small images, as it is not its arithmetic that is measured."""

RATE = 1e-3
SMALL: list[Shape] = [(64, 64), (64,)]


@dataclass
class ModelSubject:
    """An entry; its parameters share their memory with those of the others."""

    parameters: Sequence[Tensor]
    loss: Loss
    optimizer: Any
    exchange: bool = False  # Whether the step of the optimizer is left out

    @property
    def called(self) -> float | None:
        return None

    def step(self) -> float:
        """Make a step; of ``exchange``, only the backward pass and what it sets off count."""
        device = str(self.parameters[0].device)
        if not self.exchange:
            begin = self._now(device)
            self.optimizer.zero_grad()
            self.loss(self.parameters).backward()
            self.optimizer.step()
            return self._now(device) - begin
        self.release()
        loss = self.loss(self.parameters)
        begin = self._now(device)
        loss.backward()
        self.synchronize()
        return self._now(device) - begin

    @staticmethod
    def _now(device: str) -> float:
        settle(device)
        return time.perf_counter()

    def synchronize(self) -> None:
        """Wait until the gradients are reduced."""

    def release(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def stats(self) -> Stats | None:
        return None


class Models:
    """The parameters and losses of one rank."""

    def __init__(self, rank: int, device: str) -> None:
        torch.set_num_threads(1)
        self._rank, self._device = rank, device
        self._weights: dict[str, list[Tensor]] = {}
        self._gradients: dict[str, tuple[list[Tensor], list[Tensor]]] = {}

    def make(self, what: str, model: str) -> tuple[list[Tensor], Loss]:
        """Return parameters, which share their memory with those of other entries, and the loss."""
        shapes = SMALL if model == "small" else SHAPES[model]()
        if model not in self._weights:
            self._weights[model] = self._on_device(weights(shapes))
        parameters = [torch.nn.Parameter(weight.detach()) for weight in self._weights[model]]
        ready = what == "exchange" or model in ("small", "many")
        return parameters, self._ready(model, shapes) if ready else LOSSES[model](self._rank, self._device)

    def _ready(self, model: str, shapes: Sequence[Shape]) -> Loss:
        """Return a loss whose gradients are there already; backward hands them out, the last parameter first."""
        if model not in self._gradients:
            rng = np.random.default_rng((1, self._rank))
            values = (0.01 * rng.standard_normal(shape, np.float32) for shape in shapes)
            empty = (np.empty(shape, np.float32) for shape in shapes)
            self._gradients[model] = self._on_device(values), self._on_device(empty)
        given, handed = self._gradients[model]

        def loss(parameters: Sequence[Tensor]) -> Tensor:
            torch._foreach_copy_(handed, given)
            value = torch.zeros((), device=self._device, requires_grad=True)
            for parameter, gradient in zip(parameters, handed, strict=True):
                value = _READY.apply(value, parameter, gradient)
            return value

        return loss

    def _on_device(self, arrays: Iterable[Any]) -> list[Tensor]:
        return [from_numpy(array).to(self._device) for array in arrays]


class _Ready(torch.autograd.Function):
    """The identity of its first argument; gives the third as the gradient of the second, without a copy."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return value.clone()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, None]:
        return outer, ctx.gradient.view(ctx.gradient.shape), None


_READY: Any = _Ready


def from_numpy(array: Any) -> Tensor:
    """Return a tensor in numpy's memory, which lies on large pages."""
    return torch.from_numpy(array)


def weights(shapes: Sequence[Shape]) -> Iterator[Any]:
    """Yield initial weights: of He et al.'s variance; 1 for the scale that follows the kernel of a convolution."""
    rng, before = np.random.default_rng(0), 0
    for shape in shapes:
        if len(shape) > 1:
            yield rng.standard_normal(shape, np.float32) * np.float32(np.sqrt(2 / prod(shape[1:])))
        else:
            yield np.full(shape, before == 4, np.float32)
        before = len(shape)


def linear(rank: int, device: str) -> Loss:
    draw = torch.Generator().manual_seed(rank)
    inputs = torch.randn(BATCH, WIDTH, generator=draw).to(device)
    labels = torch.randint(CLASSES, (BATCH,), generator=draw).to(device)

    def loss(parameters: Sequence[Tensor]) -> Tensor:
        x = torch.nn.functional.linear(inputs, *parameters[:2])
        for i in range(2, len(parameters), 2):
            x = torch.nn.functional.linear(x.relu(), *parameters[i : i + 2])
        return torch.nn.functional.cross_entropy(x, labels)

    return loss


def mlp(rank: int, device: str) -> Loss:
    draw = torch.Generator().manual_seed(rank)
    inputs = torch.randn(BATCH, NARROW, generator=draw).to(device)
    labels = torch.randint(CLASSES, (BATCH,), generator=draw).to(device)
    functional = torch.nn.functional

    def loss(parameters: Sequence[Tensor]) -> Tensor:
        x = inputs
        for i in range(0, len(parameters), 3):
            matrix, scale, shift = parameters[i : i + 3]
            x = functional.layer_norm(functional.linear(x, matrix), (NARROW,), 1 + scale, shift).relu()
        return functional.cross_entropy(x, labels)

    return loss


def resnet50(rank: int, device: str) -> Loss:
    draw = torch.Generator().manual_seed(rank)
    images = torch.randn(IMAGES, 3, SIDE, SIDE, generator=draw).to(device)
    labels = torch.randint(1000, (IMAGES,), generator=draw).to(device)
    functional = torch.nn.functional

    def convolve(x: Tensor, left: Iterator[Tensor], stride: int = 1) -> Tensor:
        kernel, scale, shift = next(left), next(left), next(left)
        x = functional.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)
        return functional.batch_norm(x, None, None, scale, shift, training=True)

    def block(x: Tensor, left: Iterator[Tensor], stride: int, first: bool) -> Tensor:
        y = convolve(x, left).relu()
        y = convolve(y, left, stride).relu()
        y = convolve(y, left)
        return (y + (convolve(x, left, stride) if first else x)).relu()

    def loss(parameters: Sequence[Tensor]) -> Tensor:
        left = iter(parameters)
        x = functional.max_pool2d(convolve(images, left, 2).relu(), 3, 2, 1)
        for stage, (_, blocks) in enumerate(BLOCKS):
            for number in range(blocks):
                x = block(x, left, 2 if stage and number == 0 else 1, number == 0)
        return functional.cross_entropy(functional.linear(x.mean((2, 3)), next(left), next(left)), labels)

    return loss


LOSSES: dict[str, Callable[[int, str], Loss]] = {
    "linear": linear,
    "mlp": mlp,
    "resnet50": resnet50,
}
