"""A real gradient: of the CNN in ``examples/pytorch/digits.py``, after a short training without compression."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hvd_compress.errors import MissingPackageError, SpecError

if TYPE_CHECKING:
    from torch import Tensor, nn

EPOCHS = 2
BATCH = 32
IMAGES = 1408
SEED = 0


def digits_gradients(ranks: int) -> list[dict[str, npt.NDArray[Any]]]:
    """Train, then take the gradient of one minibatch for each rank.

    Args:
        ranks: How many minibatches; no two of them share an image.

    Returns:
        Name to gradient, for each rank.

    Raises:
        MissingPackageError: If PyTorch or scikit-learn is not installed.
        SpecError: If there are not enough images for so many ranks.
    """
    try:
        import torch
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingPackageError(
            f"the input 'digits' needs PyTorch and scikit-learn ({error}); install them with: pip install torch"
            " scikit-learn, or leave it out: --inputs gaussian,blocky,shuffled,embedding"
        ) from error
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
            model = _model()
        _train(model, x, y)
        return [_gradient(model, x[batch], y[batch]) for batch in _batches(len(x), EPOCHS)[:ranks]]
    finally:
        torch.set_num_threads(threads)


def _model() -> nn.Sequential:
    from torch import nn

    return nn.Sequential(
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


def _batches(n: int, epoch: int) -> list[npt.NDArray[Any]]:
    """The images of each minibatch of an epoch."""
    order = np.random.default_rng((SEED, epoch)).permutation(n)[:IMAGES]
    return np.split(order, IMAGES // BATCH)


def _train(model: nn.Sequential, x: Tensor, y: Tensor) -> None:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
    for epoch in range(EPOCHS):
        for batch in _batches(len(x), epoch):
            _backward(model, x[batch], y[batch])
            optimizer.step()


def _backward(model: nn.Sequential, x: Tensor, y: Tensor) -> None:
    import torch

    model.zero_grad()
    torch.autograd.backward(torch.nn.functional.cross_entropy(model(x), y))


def _gradient(model: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, npt.NDArray[Any]]:
    _backward(model, x, y)
    return {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
