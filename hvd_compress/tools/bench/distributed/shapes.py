"""The shapes of the gradients that are measured."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import prod

from hvd_compress.ops.arrays import Shape

WIDTH, DEPTH, CLASSES = 1024, 8, 10
"""The model ``linear``."""

NARROW, BLOCKS_OF_MLP = 256, 80
"""The model ``mlp``."""

BLOCKS = ((64, 3), (128, 4), (256, 6), (512, 3))
"""ResNet-50: the width of each stage, and how many blocks it has."""

EXPANSION = 4
"""The last convolution of a block is so many times as wide."""


def linear() -> list[Shape]:
    """Return eight linear layers of 1024 and a head: 8,407,050 parameters in 18 tensors."""
    widths = [WIDTH] * (DEPTH + 1) + [CLASSES]
    return [shape for i, o in pairwise(widths) for shape in ((o, i), (o,))]


def mlp() -> list[Shape]:
    """Return 80 linear layers of 256 without bias, each followed by a LayerNorm: 5,283,840 parameters, 240 tensors."""
    return [(NARROW, NARROW), (NARROW,), (NARROW,)] * BLOCKS_OF_MLP


def many() -> list[Shape]:
    """Return so many small tensors that the cost of each dominates."""
    return [(64, 32)] * 500


def resnet50() -> list[Shape]:
    """Return ResNet-50 for 1000 classes: 25,557,032 parameters in 161 tensors, in the order of its modules.

    A convolution has a kernel (out, in, k, k) and no bias; the normalisation after it has a scale and a shift.
    """
    return [*_resnet50(), (1000, BLOCKS[-1][0] * EXPANSION), (1000,)]


def _resnet50() -> Iterator[Shape]:
    yield from _convolution(64, 3, 7)
    inputs = 64
    for width, blocks in BLOCKS:
        for block in range(blocks):
            yield from _convolution(width, inputs, 1)
            yield from _convolution(width, width, 3)
            yield from _convolution(width * EXPANSION, width, 1)
            if block == 0:
                yield from _convolution(width * EXPANSION, inputs, 1)
            inputs = width * EXPANSION


def _convolution(outputs: int, inputs: int, kernel: int) -> Iterator[Shape]:
    yield (outputs, inputs, kernel, kernel)
    yield (outputs,)
    yield (outputs,)


SHAPES = {"linear": linear, "mlp": mlp, "resnet50": resnet50, "many": many}


def count(shapes: list[Shape]) -> int:
    return sum(map(prod, shapes))
