"""Survey of candidates: what each costs and loses on the gradients of one rank, without the others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import World
from hvd_compress.core.method import Method
from hvd_compress.errors import CompressionError
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
        bytes: Bytes that leave the node; see `hvd_compress.transport.mirror.wire`.
        rounds: Collectives, but for those within a node.
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
        method: The candidates: a `Choice`, or its reduce-scatter.
        gradients: Gradients of this rank without a residual, each flat and in the dtype of the bucket.
        rows: Number of equal parts of the bucket, one for each rank of a reduce-scatter.
    """

    ops: Ops
    bucket: Bucket
    method: Method
    gradients: Sequence[Array]
    rows: int = 1


class Found(NamedTuple):
    """Facts of the candidates in one bucket.

    Attributes:
        numel: Number of coordinates of the bucket.
        facts: Facts of each candidate.
    """

    numel: int
    facts: Sequence[Facts]


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
    found = [survey_bucket(part, candidates, world, missing, clock) for part in parts]
    return joined(found, len(candidates), lambda rounds: max(rounds, default=0.0))


def survey_bucket(
    part: Part,
    candidates: Sequence[int],
    world: World,
    missing: frozenset[type],
    clock: Callable[[], float] = time.perf_counter,
) -> Found | None:
    """Survey one bucket; otherwise like `survey`."""
    sample = _sample(part)
    if not all(math.isfinite(float(part.ops.sum_squares(x))) for x in sample.gradients):
        return None
    share = part.bucket.numel / max(sample.bucket.numel, 1)
    return Found(part.bucket.numel, [_judge(sample, number, share, world, missing, clock) for number in candidates])


def joined(
    found: Sequence[Found | None], candidates: int, rounds: Callable[[Sequence[float]], float] = sum
) -> list[Facts] | None:
    """Return the facts of each candidate in all buckets; None if a gradient is not finite.

    Args:
        found: What was found in each bucket.
        candidates: Number of the candidates.
        rounds: Returns the rounds of all buckets: by default, those of one bucket follow those of another one.
    """
    known = [one for one in found if one is not None]
    numel = max(sum(one.numel for one in known), 1)

    def facts(number: int) -> Facts:
        each = [(one.numel, one.facts[number]) for one in known]
        return Facts(
            sum(one.coding for _, one in each),
            sum(one.bytes for _, one in each),
            rounds([one.rounds for _, one in each]),
            sum(n * one.error for n, one in each) / numel,
        )

    return [facts(number) for number in range(candidates)] if len(known) == len(found) else None


def _sample(part: Part) -> Part:
    """Return the first gradients of a bucket, or rows of the first one; of each of its parts."""
    each, most = len(part.bucket.shapes) // part.rows, SAMPLE // part.rows
    shapes, taken = list[Shape](), 0
    for shape in part.bucket.shapes[:each]:
        if taken + math.prod(shape) > most:
            if shapes:
                break
            shape = (max(most // math.prod(shape[1:]), 1), *shape[1:])
        shapes.append(shape)
        taken += math.prod(shape)
    starts = range(0, part.rows * each, each) if each else ()
    gradients = [part.gradients[i + k][: math.prod(shape)] for i in starts for k, shape in enumerate(shapes)]
    bucket = Bucket(part.bucket.key, part.rows * tuple(shapes), part.bucket.dtype)
    return part._replace(bucket=bucket, gradients=gradients)


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
    ops, bucket, method = part.ops, part.bucket, part.method
    state = method.init(ops, bucket, mirror.world)._replace(chosen=number, last=number)
    flight = InFlight(method, ops, bucket, ops.concat(part.gradients) * 1, state, mirror, "survey")
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
    return errors / max(part.bucket.numel, 1)
