"""Helpers: the frameworks under test, buckets and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import State
from hvd_compress.core.state_tree import flatten
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Shape
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.ops.numpy_compiled import NumpyCompiledOps

Arr = npt.NDArray[Any]

COMPILED = ["torch", "compiled"]
"""Those that are compared with numpy; the second is numpy with CPU kernels, as in TensorFlow and over MPI."""

FRAMEWORKS = ["numpy", *COMPILED]


def ops_of(framework: str) -> Ops:
    """The primitives of a framework by its name."""
    if framework == "torch":
        from hvd_compress.ops.torch_devices import torch_ops

        return torch_ops("cpu")
    if framework == "compiled":
        return NumpyCompiledOps()
    assert framework == "numpy", framework
    return NumpyOps()


def bucket_of(*shapes: Shape, dtype: str = "float32") -> Bucket:
    """A bucket of these shapes."""
    return Bucket("b0", shapes, dtype)


def normal(bucket: Bucket, ranks: int, seed: int = 0) -> list[Arr]:
    """One gradient per rank, normally distributed."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(bucket.numel).astype(bucket.dtype) for _ in range(ranks)]


def leaves(state: State) -> dict[str, Arr]:
    """The leaves of a state in numpy."""
    return {path: np.asarray(leaf) for path, leaf in flatten(state).items()}
