"""Randomised Hadamard rotations by butterflies."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hvd_compress.ops import second_key
from hvd_compress.ops.kernels.cpu.bits import bits_of, float_of
from hvd_compress.ops.kernels.cpu.compiled import FLAG, FLOATS, FLOATS_OUT, INT, NOTHING, WORD, loop, part
from hvd_compress.ops.kernels.cpu.noise import scrambled

Floats: TypeAlias = npt.NDArray[np.float32]

_CACHED = 4096
"""Coordinates that are transformed while they are in the first cache."""

_SIGN = np.uint32(0x80000000)


def rotate(x: Floats, seed: int, block: int, out: Floats | None = None) -> Floats:
    """Multiply by random signs and blockwise by the normalised Hadamard matrix, as `Ops.rotate` does.

    Args:
        x: Shape ``(n,)``.
        seed: Of the signs.
        block: A power of two.
        out: Where to, ``ceil(n / block) * block`` numbers; may be ``x``. None makes a new array.

    Returns:
        Shape (blocks, block).
    """
    rows = -(-x.size // block)
    turned = np.empty(rows * block, np.float32) if out is None else out.reshape(-1)
    _transform(x, block, False, np.uint32(seed), np.uint32(second_key(seed)), turned)
    return turned.reshape(rows, block)


def unrotate(rows: Floats, seed: int, out: Floats | None = None) -> Floats:
    """Undo `rotate`: one-dimensional, with what had filled up the last block; ``out`` may be ``rows``."""
    turned = np.empty(rows.size, np.float32) if out is None else out.reshape(-1)
    _transform(rows.reshape(-1), rows.shape[1], True, np.uint32(seed), np.uint32(second_key(seed)), turned)
    return turned


@part
def _flip(x: Any, start: Any, seed: Any, key: Any, factor: Any) -> None:
    """Multiply by a factor and by the random signs of the indices from ``start`` on."""
    first = np.uint32(start)
    for i in range(x.size):
        sign = np.uint32(scrambled(np.uint32(first + np.uint32(i)), seed, key) & _SIGN)
        x[i] = float_of(np.uint32(bits_of(x[i] * factor) ^ sign))


@part
def _two(x: Any, stride: Any) -> None:
    for start in range(0, x.size, 2 * stride):
        a, b = x[start : start + stride], x[start + stride : start + 2 * stride]
        for i in range(stride):
            u, v = a[i], b[i]
            a[i], b[i] = u + v, u - v


@part
def _four(x: Any, stride: Any) -> None:
    """Two steps, with strides of ``stride`` and twice that, in one pass."""
    for start in range(0, x.size, 4 * stride):
        a, b = x[start : start + stride], x[start + stride : start + 2 * stride]
        c, d = x[start + 2 * stride : start + 3 * stride], x[start + 3 * stride : start + 4 * stride]
        for i in range(stride):
            u, v, w, z = a[i] + b[i], a[i] - b[i], c[i] + d[i], c[i] - d[i]
            a[i], b[i], c[i], d[i] = u + w, v + z, u - w, v - z


@part
def _butterflies(x: Any, stride: Any) -> None:
    """All steps with a stride of at least ``stride``."""
    while 2 * stride < x.size:
        _four(x, stride)
        stride *= 4
    if stride < x.size:
        _two(x, stride)


@loop(NOTHING, FLOATS, INT, FLAG, WORD, WORD, FLOATS_OUT)
def _transform(x: Any, block: Any, back: Any, seed: Any, key: Any, out: Any) -> None:
    """Write what is rotated, or rotated back, to ``out``, which may be ``x``."""
    factor, size = np.float32(1 / np.sqrt(block)), min(block, _CACHED)
    cached = np.empty(size, np.float32)
    for start in range(0, out.size, block):
        for here in range(start, start + block, size):
            stop = max(min(here + size, x.size), here)
            cached[: stop - here] = x[here:stop]
            cached[stop - here :] = np.float32(0)
            if not back:
                _flip(cached, here, seed, key, factor)
            _butterflies(cached, 1)
            if back and size == block:
                _flip(cached, here, seed, key, factor)
            out[here : here + size] = cached
        if size < block:
            whole = out[start : start + block]
            _butterflies(whole, size)
            if back:
                _flip(whole, start, seed, key, factor)
