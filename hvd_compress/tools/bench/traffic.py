"""What a method costs: rounds, traffic and memory, from the messages of one exchange."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllGather, AllToAll, Collective, World, run, take_branches
from hvd_compress.core.lowering import LACKS, lower
from hvd_compress.methods.base import Method
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.spec import parse
from hvd_compress.state import flatten
from hvd_compress.tools.bench.inputs import RMS, SEED, Arr

SIDE = 256
"""Rows and columns of the gradient that costs are measured on: normal numbers."""

SPARSE = {"homomorphic": 0.02}
"""Methods for gradients that are mostly zero, and the share of coordinates that are not."""

SIZES = (2, 8, 64)


class Cost(NamedTuple):
    """What one step of a method costs.

    Attributes:
        rounds: Collectives, one after another, of a bucket.
        allreduce: Whether all of them are allreduces, or are as cheap with many ranks: traffic does not grow with them.
        state_bytes: What a rank keeps between steps, for each coordinate of a float32 gradient, its residual included.
        bits: What a rank sends for each coordinate, metadata included, by the number of ranks.
    """

    rounds: int
    allreduce: bool
    state_bytes: float
    bits: dict[int, float]


@cache
def cost(name: str) -> Cost:
    """Measure a method with its default parameters."""
    method, bucket = parse(name).core, Bucket("b0", ((SIDE, SIDE),), "float32")
    rng = np.random.default_rng(SEED)
    x = (RMS * rng.standard_normal(bucket.numel) * (rng.random(bucket.numel) < SPARSE.get(name, 1))).astype(np.float32)
    sent = {size: messages(method, bucket, x, size) for size in SIZES}
    bits = {size: sum(8 * share(type(m).__name__, size) * m.array.nbytes for m in sent[size]) for size in SIZES}
    state = flatten(method.init(NumpyOps(), bucket, SIZES[0])).values()
    kinds = {type(message) for message in sent[SIZES[0]]}
    return Cost(
        len(sent[SIZES[0]]),
        AllGather not in kinds or AllToAll in kinds,  # an allgather that hands out what an alltoall has collected
        sum(leaf.nbytes for leaf in state if not isinstance(leaf, int)) / bucket.numel,
        {size: total / bucket.numel for size, total in bits.items()},
    )


def share(kind: str, size: int) -> float:
    """What a rank sends on average, in units of what it hands to a collective of this kind; rings, as in Gloo.

    An allreduce passes every part of the array round twice, once to be summed and once to be spread: ``2 (n - 1) / n``
    of the array from each rank. An allgather passes each rank's array on n - 1 times. An alltoall keeps a rank's own
    row, ``1 / n`` of its array, at home. A broadcast reaches n - 1 ranks.
    """
    n = size
    return {"AllReduce": 2 * (n - 1) / n, "AllGather": n - 1, "AllToAll": (n - 1) / n, "Broadcast": (n - 1) / n}[kind]


def messages(method: Method, bucket: Bucket, x: Arr, size: int) -> list[Collective]:
    """What rank 0 asks Horovod for in the first step.

    The sizes of messages are the same on all ranks, or nearly so, so that the others are not computed: what they gather
    is what rank 0 does, and what they add is zero.
    """
    ops, world = NumpyOps(), World(0, size)
    exchanging = method.exchange(ops, bucket, x.copy(), method.init(ops, bucket, size), world)
    sent: list[Collective] = []

    def answer(message: Collective) -> Any:
        sent.append(message._replace(array=message.array.copy()))
        return _reply(message, size)

    run(take_branches(lower(exchanging, ops, world, LACKS)), answer)
    return sent


def _reply(message: Collective, size: int) -> Any:
    array = message.array
    if isinstance(message, AllGather):
        return np.concatenate([array] * size) if message.ragged else np.stack([array] * size)
    return np.stack([array[0]] * size) if isinstance(message, AllToAll) else array.copy()
