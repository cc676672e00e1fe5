"""A task that is done in no time: to tell which of ten directions a point lies in."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from hvd_compress.lab import Setting, Training

POINTS, WIDTH = 64, 32


def build(setting: Setting) -> Training:
    """A perceptron with one hidden layer; ``epochs`` makes it last, and readers of the pipe ``tell`` get its id."""
    draw = torch.Generator().manual_seed(1)
    directions = torch.randn(WIDTH, 10, generator=draw)
    x = torch.randn(POINTS * 8, WIDTH, generator=draw)
    y = (x @ directions).argmax(1)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    momentum = 0.9 if setting.momentum else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.lr or 0.05, momentum=momentum)

    def batches(epoch: int) -> list[torch.Tensor]:
        if epoch and "tell" in setting.options:
            tell(setting.options["tell"])
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * setting.seed + epoch))
        return list(torch.split(order[setting.rank :: setting.size], POINTS // setting.size))

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(x[batch]), y[batch])

    def evaluate(model: torch.nn.Module) -> float:
        return float((model(x).argmax(1) == y).float().mean())

    epochs = int(setting.options.get("epochs", "5"))
    return Training(model, optimizer, batches, loss, evaluate, target=0.8, epochs=epochs, every=4)


def tell(path: str) -> None:
    """Write the id of this process into a pipe, if someone reads there."""
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return
    os.write(pipe, f"{os.getpid()}\n".encode())
    os.close(pipe)


def explode(setting: Setting) -> Training:
    """The same with a learning rate that no model survives."""
    return build(setting._replace(lr=1e30))


def halt(setting: Setting) -> Training:
    """The same with a learning rate of 0 in the second half."""
    return replace(build(setting), schedule=lambda part: float(part < 0.5))


def break_off(setting: Setting) -> Training:
    """The same, but compression finds momentum that it does not go with."""
    return build(setting._replace(momentum=True))
