"""Survey of candidates: what each costs and loses on the gradients of one rank, without the others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import World
from hvd_compress.errors import CompressionError
from hvd_compress.methods.wrappers.alternatives import Choice
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array, Shape
from hvd_compress.ops.totals import dense
from hvd_compress.transport.mirror import Mirror
from hvd_compress.transport.protocol import InFlight

SAMPLE = 2**19
"""Numbers of a bucket that are surveyed."""

_WORST = 1e6
"""Largest relative error that is told apart, as of a sum that is not finite."""


class Facts(NamedTuple):
    """Cost and error of one step of a candidate on one rank.

    Attributes:
        coding: Seconds of compression and decompression.
        bytes: Bytes sent, with rings.
        rounds: Collectives.
        error: Mean over the coordinates of the relative squared error of the gradient that each belongs to: Adam's
            updates do not depend on the scale of a gradient.
    """

    coding: float
    bytes: float
    rounds: float
    error: float


class Part(NamedTuple):
    """Bucket of a survey.

    Attributes:
        ops: Primitives of the framework.
        bucket: Shapes and dtype.
        method: The candidates.
        gradients: Gradients of this rank without a residual, each flat and in the dtype of the bucket.
    """

    ops: Ops
    bucket: Bucket
    method: Choice
    gradients: Sequence[Array]


def survey(
    parts: Sequence[Part],
    candidates: Sequence[int],
    world: World,
    missing: frozenset[type],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Facts] | None:
    """Exchange a sample of the gradients of this rank by each candidate, as if all ranks had the same.

    Args:
        parts: The buckets that have a choice.
        candidates: Numbers of the candidates.
        world: The ranks.
        missing: Collectives that the transport does not support.
        clock: Returns the time in seconds.

    Returns:
        Facts of each candidate; None if a gradient is not finite.
    """
    samples = [_sample(part) for part in parts]
    if not all(math.isfinite(float(part.ops.sum_squares(x))) for part, _ in samples for x in part.gradients):
        return None
    found = []
    for number in candidates:
        each = [_judge(part, number, share, world, missing, clock) for part, share in samples]
        numels = [share * part.bucket.numel for part, share in samples]
        error = sum(one.error * n for one, n in zip(each, numels, strict=True)) / max(sum(numels), 1)
        rounds = max((one.rounds for one in each), default=0.0)
        found.append(Facts(sum(one.coding for one in each), sum(one.bytes for one in each), rounds, error))
    return found


def _sample(part: Part) -> tuple[Part, float]:
    """Return the first gradients of a bucket, or rows of the first one, and how many times as large the bucket is."""
    shapes, gradients, taken = list[Shape](), list[Array](), 0
    for shape, gradient in zip(part.bucket.shapes, part.gradients, strict=True):
        if taken + math.prod(shape) > SAMPLE:
            if shapes:
                break
            row = math.prod(shape[1:])
            shape = (max(SAMPLE // row, 1), *shape[1:])
        shapes.append(shape)
        gradients.append(gradient[: math.prod(shape)])
        taken += math.prod(shape)
    bucket = Bucket(part.bucket.key, tuple(shapes), part.bucket.dtype)
    return part._replace(bucket=bucket, gradients=gradients), part.bucket.numel / taken


def _judge(
    part: Part, number: int, share: float, world: World, missing: frozenset[type], clock: Callable[[], float]
) -> Facts:
    """Return the facts of one candidate in one bucket.

    Its error is that of a rank on its own, where all that is received is known. That run also compiles what the next
    one is timed with.
    """
    try:
        error = _error(part, _run(part, number, Mirror(World(0, 1), part.ops, missing)))
        mirror = Mirror(world._replace(rank=0), part.ops, missing)  # the one that leads, if one does
        begin = clock()
        float(part.ops.sum_squares(_run(part, number, mirror)[:1]))  # waits for the device
    except CompressionError:  # as of a method that does not support so many ranks
        return Facts(0.0, 0.0, 0.0, math.nan)
    return Facts((clock() - begin) * share, mirror.bytes_sent * share, mirror.rounds, error)


def _run(part: Part, number: int, mirror: Mirror) -> Array:
    """Return the sum of an exchange."""
    ops, bucket, method, gradients = part
    state = method.init(ops, bucket, mirror.world)._replace(chosen=number, last=number)
    flight = InFlight(method, ops, bucket, ops.concat(gradients) * 1, state, mirror, "survey")
    while flight.result is None:
        flight.go_on()
    return dense(ops, flight.ended.total)


def _error(part: Part, total: Array) -> float:
    ops, errors, end = part.ops, 0.0, 0
    for size, gradient in zip(part.bucket.sizes, part.gradients, strict=True):
        end += size
        norm = float(ops.sum_squares(gradient))
        if norm:
            errors += size * min(float(ops.sum_squares(total[end - size : end] - gradient)) / norm, _WORST)
    return errors / part.bucket.numel
