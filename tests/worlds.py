"""Helpers: the frameworks under test, and a world that runs a method on the arrays of any of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.bucket import Bucket, Shape
from hvd_compress.collectives import Exchange, State, World, take_branches
from hvd_compress.local import perform
from hvd_compress.methods.base import Method
from hvd_compress.ops import Ops
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.state import flatten

Arr = npt.NDArray[Any]

FRAMEWORKS = ["numpy", "torch", "tensorflow"]


def ops_of(framework: str) -> Ops:
    """The primitives of a framework by its name."""
    if framework == "torch":
        from hvd_compress.ops.torch import TorchOps

        return TorchOps()
    if framework == "tensorflow":
        from hvd_compress.ops.tensorflow import TensorFlowOps

        return TensorFlowOps()
    return NumpyOps()


def drive(ops: Ops, method: Method, bucket: Bucket, xs: list[Arr], states: list[State]) -> list[Exchange]:
    """Run one exchange per rank in lock step, on the framework's arrays; collectives are done in numpy."""
    size = len(xs)
    running = [
        take_branches(method.exchange(ops, bucket, ops.constant(x), state, World(rank, size)))
        for rank, (x, state) in enumerate(zip(xs, states, strict=True))
    ]
    replies: list[Any] = [None] * size
    while True:
        messages, results = [], []
        for generator, reply in zip(running, replies, strict=True):
            try:
                messages.append(generator.send(reply))
            except StopIteration as end:
                results.append(end.value)
        if not messages:
            return results
        plain = [message._replace(array=np.asarray(message.array)) for message in messages]
        replies = [ops.constant(reply) for reply in perform(plain, size)]


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
