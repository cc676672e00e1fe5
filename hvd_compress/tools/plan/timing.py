"""How long one rank of several compresses and decompresses, in this process.

As in training, memory is used again: what is new to a process takes longer to touch than most methods compute. So the
results of a step are dropped before the next, and the last rank is timed.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

import numpy as np

from hvd_compress.core.bucket import Bucket
from hvd_compress.ops import Ops
from hvd_compress.spec import parse
from hvd_compress.tools.bench.local.kernels import compiled
from hvd_compress.tools.bench.local.methods import timed_step
from hvd_compress.tools.bench.local.timing import Copy, seconds


class Timed(NamedTuple):
    """One measurement, in seconds for each parameter.

    Attributes:
        ranks: Whose payloads were decoded.
        encode: From the gradient to the last payload, with all that is kept for the next step.
        decode: From what the last collective gives to the total.
        copy: A plain copy of the gradient.
    """

    ranks: int
    encode: float
    decode: float
    copy: float


def time_method(spec: str, size: int, side: int, ranks: int, turns: int) -> Timed:
    """Time a method on normal gradients: the best of several turns, as all else that a machine does only adds to it.

    Args:
        spec: Of the method.
        size: About how many numbers a gradient has.
        side: Rows and columns of the matrices that it is made of.
        ranks: Whose payloads are decoded.
        turns: How often, after one that does not count.

    Raises:
        MissingPackageError: If numba is not installed.
    """
    ops, method = _ops(), parse(spec).core
    bucket = Bucket("b0", ((side, side),) * max(1, size // side**2), "float32")
    rng, copy = np.random.default_rng(0), Copy(bucket.numel)
    grads = [rng.standard_normal(bucket.numel, dtype=np.float32) for _ in range(ranks)]
    states = [method.init(ops, bucket, ranks) for _ in grads]
    steps = []
    for _ in range(turns + 1):
        step = timed_step(ops, method, bucket, grads, states, rank=-1)
        states = step.states
        steps.append((step.encode, step.decode, seconds(copy)))
    encode, decode, copied = (min(times) / bucket.numel for times in zip(*steps[1:], strict=True))
    return Timed(ranks, encode, decode, copied)


def _ops() -> Ops:
    """Those of PyTorch, with one thread, as a rank on a processor has; of numpy where it is not installed."""
    compiled()  # says what is missing
    try:
        importlib.import_module("torch").set_num_threads(1)
    except ImportError:
        from hvd_compress.ops.numpy_compiled import NumpyCompiledOps

        return NumpyCompiledOps()
    from hvd_compress.ops.torch_devices import torch_ops

    return torch_ops("cpu")
