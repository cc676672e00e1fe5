"""Gradients of a small CNN on scikit-learn's digits, after a short training without compression."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hvd_compress.errors import SpecError
from hvd_compress.tools.compare.tasks.torch_tasks import cnn

EPOCHS = 2
BATCH = 32
IMAGES = 1408
SEED = 0


def digits_cnn() -> nn.Sequential:
    """Return the CNN of ``examples/pytorch/digits.py``."""
    return cnn(8, (False, True), 128)


def digits_gradients(ranks: int) -> list[dict[str, npt.NDArray[Any]]]:
    """Train, then take the gradient of one minibatch for each rank.

    Args:
        ranks: How many minibatches; no two of them share an image.

    Returns:
        Name to gradient, for each rank.

    Raises:
        ImportError: If scikit-learn is not installed.
        SpecError: If there are not enough images for so many ranks.
    """
    from sklearn.datasets import load_digits

    if ranks > IMAGES // BATCH:
        raise SpecError(f"ranks={ranks} is not allowed: the digits have minibatches for 1 to {IMAGES // BATCH} ranks")
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of additions depends on the number of threads
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = digits_cnn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
        for epoch in range(EPOCHS):
            for batch in _batches(len(x), epoch):
                _backward(model, x[batch], y[batch])
                optimizer.step()
        return [_gradient(model, x[batch], y[batch]) for batch in _batches(len(x), EPOCHS)[:ranks]]
    finally:
        torch.set_num_threads(threads)


def _batches(n: int, epoch: int) -> list[npt.NDArray[Any]]:
    order = np.random.default_rng((SEED, epoch)).permutation(n)[:IMAGES]
    return np.split(order, IMAGES // BATCH)


def _backward(model: nn.Sequential, x: Tensor, y: Tensor) -> None:
    model.zero_grad()
    torch.autograd.backward(nn.functional.cross_entropy(model(x), y))


def _gradient(model: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, npt.NDArray[Any]]:
    _backward(model, x, y)
    return {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
