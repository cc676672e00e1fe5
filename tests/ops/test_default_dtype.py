"""What PyTorch makes where nobody says of which dtype, or on which device, changes no bit of any method."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from catalogue import COMPOSED, SPECS, WARMING_UP, one_in
from worlds import Arr

from hvd_compress import LocalWorld
from hvd_compress.core.router import Router
from hvd_compress.ops.torch import TorchCpuOps, TorchOps

METHODS: dict[str, str | Router] = {**{spec: spec for spec in [*SPECS, *WARMING_UP, "topk:measure=on"]}, **COMPOSED}
OPS = {"compiled": TorchCpuOps(), "composed": TorchOps("cpu")}
SHAPES = {"first": (40, 30), "second": (6, 300), "bias": (7,)}


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    """Have PyTorch make tensors of this dtype where none is said, and without memory where no device is said."""
    torch.set_default_dtype(dtype)
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def outcome(ops: TorchOps, method: str | Router) -> list[Arr]:
    """What two steps of two ranks give, and what is kept back after them."""
    world, rng = LocalWorld(method, 2, ops=ops), np.random.default_rng(0)
    found: list[Arr] = []
    for _ in range(2):
        grads = {
            name: [rng.standard_normal(shape).astype(np.float32) for _ in range(2)] for name, shape in SHAPES.items()
        }
        found += [means[0] for means in world.step(grads).values()]
    return [*found, *world.residual(0).values()]


@pytest.mark.parametrize(("spec", "ops"), one_in(4, itertools.product(METHODS, OPS)))
def test_methods_give_the_same_bits(spec: str, ops: str) -> None:
    expected = outcome(OPS[ops], METHODS[spec])
    for dtype in (torch.bfloat16, torch.float64):
        with default(dtype):
            found = outcome(OPS[ops], METHODS[spec])
        np.testing.assert_equal(found, expected)
