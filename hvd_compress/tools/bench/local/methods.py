"""The speed of whole methods, with all ranks in one process: nothing is sent, and nobody waits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import State, World
from hvd_compress.core.method import Method
from hvd_compress.engine.spec import parse
from hvd_compress.errors import MissingPackageError
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.totals import dense
from hvd_compress.tools.bench.local.timing import Floats, plain_copy, seconds
from hvd_compress.transport.lockstep import run_lockstep_encoded


class Line(NamedTuple):
    """A result; times are of one rank and one step, medians."""

    spec: str
    encode_ms: float  # From the gradient to the last payload, with all that is kept for the next step
    decode_ms: float  # From what the last collective gives to the total
    encode: float  # The same in plain copies of the gradient
    decode: float  # The same in plain copies of the gradient
    bits: float  # Payload bits per coordinate
    vnmse: float  # vNMSE of the mean of the first step


class Step(NamedTuple):
    """A step of several ranks in one process, of which one was timed."""

    encode: float  # Seconds before the last collective
    decode: float  # Seconds after it
    copy: float  # Seconds of a plain copy of the gradient
    sent: int  # Bytes that a rank handed to collectives
    total: Array  # The sum over ranks
    states: list[State]


def measure(
    specs: Sequence[str], n: int, ranks: int, turns: int, progress: Callable[[str], None] = lambda spec: None
) -> list[Line]:
    """Time the steps of methods on normal gradients of about ``n`` coordinates, as one square matrix.

    Raises:
        SpecError: If a spec is invalid.
        MissingPackageError: If numba is not installed.
    """
    methods = [parse(spec).core for spec in specs]  # a mistake shows before anything is computed
    side = max(1, math.isqrt(n))
    bucket, ops = Bucket("", ((side, n // side),), "float32"), numpy_ops()
    grads = normal_gradients(bucket, ranks)
    lines = []
    for spec, method in zip(specs, methods, strict=True):
        progress(spec)
        lines.append(_line(spec, bucket, grads, timed_steps(ops, method, bucket, grads, turns)))
    return lines


def normal_gradients(bucket: Bucket, ranks: int) -> list[Floats]:
    """Draw a flat gradient for each rank."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(bucket.numel, dtype=np.float32) for _ in range(ranks)]


def _line(spec: str, bucket: Bucket, grads: Sequence[Floats], steps: Iterator[Step]) -> Line:
    exact = np.mean(np.stack(grads), axis=0, dtype=np.float64)
    error = np.asarray(next(steps).total, np.float64) / len(grads) - exact
    vnmse = float(error @ error) / float(exact @ exact)
    times = [(step.encode, step.decode, step.copy, step.sent) for step in steps]
    encode, decode, copy, sent = map(median, zip(*times, strict=True))
    bits = 8 * sent / bucket.numel
    return Line(spec, 1000 * encode, 1000 * decode, encode / copy, decode / copy, bits, vnmse)


def timed_steps(
    ops: Ops, method: Method, bucket: Bucket, grads: Sequence[Floats], turns: int, rank: int = 0
) -> Iterator[Step]:
    """Run steps of all ranks, and time one rank and a plain copy of its gradient.

    The first step does not count, as its memory is new; so many ``turns`` follow.
    """
    copy = plain_copy(bucket.numel)
    states: Sequence[State] = [method.init(ops, bucket, World(i, len(grads))) for i in range(len(grads))]
    for _ in range(turns + 1):
        step = _timed_step(ops, method, bucket, grads, states, rank)
        states = step.states
        yield step._replace(copy=seconds(copy))


def _timed_step(
    ops: Ops, method: Method, bucket: Bucket, grads: Sequence[Floats], states: Sequence[State], rank: int
) -> Step:
    sent: list[int] = []
    flights = run_lockstep_encoded(
        ops, method, bucket, grads, states, lambda message: sent.append(message.array.nbytes)
    )
    *encode, decode = flights[rank].laps
    begin = time.perf_counter()
    total = dense(ops, flights[rank].ended.total)
    decode += time.perf_counter() - begin
    return Step(sum(encode), decode, 0.0, sum(sent), total, [flight.ended.state for flight in flights])


def numpy_ops() -> Ops:
    """Return numpy's primitives with compiled kernels.

    Raises:
        MissingPackageError: If numba is not installed.
    """
    try:
        from hvd_compress.ops.numpy_compiled import NumpyCompiledOps
    except ImportError as error:
        raise MissingPackageError(
            f"the kernels for CPUs need numba ({error}); install it with: pip install numba"
        ) from error
    return NumpyCompiledOps()
