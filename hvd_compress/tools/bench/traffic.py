"""The rounds, traffic and state of a method, counted in the messages of one exchange."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import (
    Collective,
    Drive,
    Scope,
    World,
)
from hvd_compress.core.method import Method
from hvd_compress.core.state_tree import flatten
from hvd_compress.engine.spec import parse
from hvd_compress.methods import REGISTRY
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.transport.lowering import LACKS, lower
from hvd_compress.transport.mirror import Mirror, share, wire

Arr = npt.NDArray[Any]

SEED = 2024
RMS = 0.003
"""Root mean square of synthetic gradients: about that of a small CNN, so that fixed thresholds fit."""

SIDE = 256
"""Rows and columns of the gradient that costs are measured on: normal numbers."""

SIZES = (2, 8, 64)
"""World sizes of the catalogue."""


class Message(NamedTuple):
    """A collective of one exchange, per coordinate of the gradient."""

    kind: str  # The name of its class
    bytes: float  # The payload that a rank hands to it
    halves: float  # The count of float16 that are summed in it
    scope: Scope = "world"  # The ranks that take part

    def sends(self, ranks: int, ranks_per_host: int = 1) -> float:
        """Return the bytes that a rank sends."""
        return self.bytes * share(self.kind, self.members(ranks, ranks_per_host))

    def members(self, ranks: int, ranks_per_host: int) -> int:
        """Return how many ranks take part."""
        return {"world": ranks, "node": ranks_per_host, "across": ranks // ranks_per_host}[self.scope]

    def wire(self, ranks: int, ranks_per_host: int = 1) -> float:
        """Return the bytes at the network device of a host; 0 if there is one host only."""
        if ranks <= ranks_per_host or self.scope == "node":
            return 0.0
        return self.bytes * wire(self.kind, self.scope, ranks, ranks_per_host)


class Cost(NamedTuple):
    """The cost of one step of a method."""

    rounds: int  # Collectives of a bucket, one after another
    # Whether all of them are allreduces, or are as cheap with many ranks: traffic does not grow with them
    allreduce: bool
    state_bytes: float  # Bytes that a rank keeps between steps per coordinate of a float32 gradient, residual included
    bits: dict[int, float]  # Bits that a rank sends per coordinate, metadata included, by world size


@cache
def cost(name: str) -> Cost:
    """Measure a method with its default parameters."""
    method, bucket, first = parse(name).core, _bucket(SIDE), sent(name, SIZES[0])
    state = flatten(method.init(NumpyOps(), bucket, World(0, SIZES[0]))).values()
    return Cost(
        len(first),
        not grows(first),
        sum(leaf.nbytes for leaf in state if not isinstance(leaf, int)) / bucket.numel,
        {size: 8 * sum(share(m.kind, size) * m.bytes for m in sent(name, size)) for size in SIZES},
    )


@cache
def sent(spec: str, ranks: int, side: int = SIDE, ranks_per_host: int = 1) -> tuple[Message, ...]:
    """Return the messages of rank 0 in one exchange of a matrix of ``side * side`` normal numbers.

    Their number does not depend on the world size, so that two ranks or hosts tell it. With more, the exchange goes up
    to the last message and no further: to decode the payloads of a thousand ranks would take long.

    Raises:
        SpecError: If the spec is invalid.
        UnsupportedError: If the method does not support so many ranks.
    """
    method, bucket = parse(spec).core, _bucket(-(-side // ranks_per_host) * ranks_per_host)
    rng = np.random.default_rng(SEED)
    dense = REGISTRY[spec.partition(":")[0]].card.nonzero
    x = (RMS * rng.standard_normal(bucket.numel) * (rng.random(bucket.numel) < dense)).astype(np.float32)
    fewest = SIZES[0] * ranks_per_host
    most = None if ranks <= fewest else len(sent(spec, fewest, side, ranks_per_host))
    world = World(0, ranks, min(ranks, ranks_per_host))
    return tuple(_message(one, bucket.numel) for one in messages(method, bucket, x, world, most))


def _bucket(side: int) -> Bucket:
    return Bucket("b0", ((side, side),), "float32")


def _message(message: Collective, numel: int) -> Message:
    halves = message.array.size if message.array.dtype == np.float16 else 0
    return Message(type(message).__name__, message.array.nbytes / numel, halves / numel, message.scope)


def grows(asked: tuple[Message, ...]) -> bool:
    """Return whether what a rank receives, and has to decode, grows with the world size.

    An allgather that hands out what an alltoall has collected does not.
    """
    kinds = {message.kind for message in asked}
    return "AllGather" in kinds and "AllToAll" not in kinds


def messages(method: Method, bucket: Bucket, x: Arr, world: World, most: int | None = None) -> list[Collective]:
    """Return the collectives that rank 0 starts in the first step.

    Payloads have the same size on all ranks, or nearly so, so that the others are not computed.

    Args:
        method: To exchange with.
        bucket: The shape of the gradient.
        x: The gradient of rank 0, flat.
        world: The ranks.
        most: Stop after so many.
    """
    ops = NumpyOps()
    mirror = Mirror(world, ops, LACKS)
    exchanging = method.exchange(ops, bucket, x.copy(), method.init(ops, bucket, world), world)
    drive = Drive(lower(exchanging, ops, world, LACKS))
    found: list[Collective] = []
    while drive.message is not None:
        found.append(drive.message._replace(array=drive.message.array.copy()))
        if len(found) == most:
            break
        drive.resume(mirror.start(drive.message, "").reply)
    return found
