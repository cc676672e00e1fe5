"""Gradients to measure methods with. The same arguments give the same gradients, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress.engine.spec import unknown
from hvd_compress.errors import MissingPackageError, SpecError
from hvd_compress.ops.arrays import Shape
from hvd_compress.tools.bench.traffic import RMS

Arr = npt.NDArray[Any]

SEED = 2024
ROW = 64
"""Coordinates in a row of `embedding`."""
NEIGHBOURS = 256
"""Coordinates in a row that have the same magnitude in `blocky`."""


class Sample(NamedTuple):
    """A gradient for each rank."""

    name: str
    ranks: list[Arr]  # One flat array per rank
    shapes: dict[str, Shape]  # Names and shapes of the tensors in these arrays, in order

    @property
    def tensors(self) -> dict[str, list[Arr]]:
        """The gradients cut into tensors; what is left over at the end is dropped."""
        cut, start = {}, 0
        for name, shape in self.shapes.items():
            end = start + math.prod(shape)
            cut[name] = [x[start:end].reshape(shape) for x in self.ranks]
            start = end
        return cut


def gaussian(size: int, ranks: int) -> Sample:
    """Return independent normal numbers on all ranks: no structure at all, and nothing in common between ranks.

    The errors of the ranks are independent as well, so the normalised error of the mean is that of one rank.
    """
    rng = np.random.default_rng(SEED)
    return _synthetic("gaussian", [RMS * rng.standard_normal(size) for _ in range(ranks)])


def blocky(size: int, ranks: int) -> Sample:
    """Return heavy-tailed gradients whose neighbours are alike.

    With a magnitude m log-normal (sigma 1.5) for each block of 256 neighbours, and s, n_i from Student's t with 4
    degrees of freedom for each coordinate, s the same on all ranks::

        g_i = m (s + n_i)
    """
    rng = np.random.default_rng(SEED)
    magnitude = np.repeat(np.exp(1.5 * rng.standard_normal(-(-size // NEIGHBOURS))), NEIGHBOURS)[:size]
    signal = rng.standard_t(4, size)
    draws = [magnitude * (signal + rng.standard_t(4, size)) for _ in range(ranks)]
    return _synthetic("blocky", [RMS / np.sqrt(np.mean(np.square(draws))) * draw for draw in draws])


def shuffled(size: int, ranks: int) -> Sample:
    """Return `blocky` with its coordinates in random order, the same on all ranks."""
    order = np.random.default_rng(SEED + 1).permutation(size)
    return _synthetic("shuffled", [x[order] for x in blocky(size, ranks).ranks])


def embedding(size: int, ranks: int) -> Sample:
    """Return gradients of an embedding: each rank has used 1% of its rows of 64, and the others are zero."""
    rng, draws = np.random.default_rng(SEED), []
    rows = -(-size // ROW)
    for _ in range(ranks):
        used = np.zeros((rows, 1))
        used[rng.permutation(rows)[: max(1, rows // 100)]] = 10 * RMS
        draws.append((used * rng.standard_normal((rows, ROW))).ravel()[:size])
    return _synthetic("embedding", draws)


def digits(size: int, ranks: int) -> Sample:
    """Return gradients of a small CNN on scikit-learn's digits, a minibatch for each rank; 151,306 coordinates.

    Raises:
        MissingPackageError: If PyTorch or scikit-learn is not installed.
    """
    del size
    try:
        from methods_page.digits import digits_gradients

        tensors = digits_gradients(ranks)
    except ImportError as error:
        raise MissingPackageError(
            f"the input 'digits' needs PyTorch and scikit-learn ({error}); install them with: pip install torch"
            " scikit-learn, or leave it out: --inputs gaussian,blocky,shuffled,embedding"
        ) from error
    flat = [np.concatenate([gradient.ravel() for gradient in rank.values()]) for rank in tensors]
    return Sample("digits", flat, {name: gradient.shape for name, gradient in tensors[0].items()})


INPUTS: dict[str, Callable[[int, int], Sample]] = {
    "gaussian": gaussian,
    "blocky": blocky,
    "shuffled": shuffled,
    "embedding": embedding,
    "digits": digits,
}


def sample(name: str, size: int, ranks: int) -> Sample:
    """Make an input by its name.

    Raises:
        SpecError: If there is no such input, or a number is out of range.
        MissingPackageError: If it needs a package that is not there.
    """
    if name not in INPUTS:
        raise SpecError(unknown("input", name, INPUTS))
    if size < 1 or ranks < 1:
        raise SpecError(f"size={size}, ranks={ranks} is not allowed: both must be at least 1")
    return INPUTS[name](size, ranks)


def _synthetic(name: str, draws: list[Arr]) -> Sample:
    """Make the largest square matrix of the coordinates, as they have no shape of their own."""
    side = math.isqrt(draws[0].size)
    return Sample(name, [draw.astype(np.float32) for draw in draws], {"matrix": (side, side)})
