"""Randomised Hadamard rotations, which spread large coordinates over their block."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array

_FACTOR = 5
"""Binary logarithm of the size of matrix factors: products with 32 x 32 matrices are efficient."""


def hadamard(ops: Ops, rows: Array) -> Array:
    """Transform each row by the normalised Hadamard matrix, which is its own inverse.

    The matrix of a block of 2^m is a Kronecker product of smaller ones, so a few small matrix products apply it.

    Args:
        ops: Primitives of the framework.
        rows: Shape ``(n, 2**m)``.

    Returns:
        The same shape and dtype.
    """
    n, size = int(rows.shape[0]), int(rows.shape[1])
    left, stride, dtype = size.bit_length() - 1, 1, ops.dtype(rows)
    while left:
        bits = min(left, _FACTOR)
        matrix = ops.constant(_matrix(bits).astype(dtype))
        if stride == 1:
            rows = ops.reshape(rows, (-1, 2**bits)) @ matrix
        else:
            rows = matrix @ ops.reshape(rows, (-1, 2**bits, stride))
        left, stride = left - bits, stride * 2**bits
    return ops.reshape(rows, (n, size))


def signs(ops: Ops, seed: Any, rows: Array) -> Array:
    """Return random +1 and -1 in the shape of ``rows``, the same on all ranks."""
    n, size = int(rows.shape[0]), int(rows.shape[1])
    coins = ops.cast(ops.uniform(seed, n * size) < 0.5, ops.dtype(rows)) * 2 - 1
    return ops.reshape(coins, (n, size))


@cache
def _matrix(bits: int) -> npt.NDArray[np.float64]:
    h = np.ones((1, 1))
    for _ in range(bits):
        h = np.block([[h, h], [h, -h]]) / np.sqrt(2)
    return h
