"""What whole methods take, with all ranks in one process: nothing is sent, and nobody waits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import Array, State
from hvd_compress.core.lockstep import fly
from hvd_compress.core.totals import dense
from hvd_compress.methods.base import Method
from hvd_compress.ops import Ops
from hvd_compress.spec import parse
from hvd_compress.tools.bench.local.kernels import compiled
from hvd_compress.tools.bench.local.timing import Copy, Floats, seconds
from hvd_compress.tools.bench.vnmse import error


class Line(NamedTuple):
    """A result; times are of one rank and one step, medians.

    Attributes:
        spec: Of the method.
        encode_ms: From the gradient to the last payload, with all that is kept for the next step.
        decode_ms: From what the last collective gives to the total.
        encode: The same in plain copies of the gradient.
        decode: The same in plain copies of the gradient.
        bits: That a rank hands to collectives, for each coordinate.
        vnmse: Of the mean of the first step; see `hvd_compress.tools.bench.vnmse`.
    """

    spec: str
    encode_ms: float
    decode_ms: float
    encode: float
    decode: float
    bits: float
    vnmse: float


class Step(NamedTuple):
    """A step of several ranks in one process, of which one was timed.

    Attributes:
        encode: Seconds before the last collective.
        decode: Seconds after it.
        sent: Bytes that a rank handed to collectives.
        total: The sum.
        states: The states of all ranks.
    """

    encode: float
    decode: float
    sent: int
    total: Array
    states: list[State]


def measure(
    specs: Sequence[str], n: int, ranks: int, turns: int, progress: Callable[[str], None] = lambda spec: None
) -> list[Line]:
    """Time the steps of methods on normal gradients of about ``n`` coordinates, as one square matrix.

    Raises:
        SpecError: If a spec is not one.
        MissingPackageError: If numba is not installed.
    """
    methods = [parse(spec).core for spec in specs]  # a mistake shows before anything is computed
    side = max(1, math.isqrt(n))
    bucket, copy = Bucket("", ((side, n // side),), "float32"), Copy(n)
    rng = np.random.default_rng(0)
    grads = [rng.standard_normal(bucket.numel, dtype=np.float32) for _ in range(ranks)]
    lines = []
    for spec, method in zip(specs, methods, strict=True):
        progress(spec)
        lines.append(_line(spec, method, bucket, grads, copy, turns))
    return lines


def _line(spec: str, method: Method, bucket: Bucket, grads: Sequence[Floats], copy: Copy, turns: int) -> Line:
    ops = _ops()
    states = [method.init(ops, bucket, len(grads)) for _ in grads]
    steps, copies, vnmse = [], [], math.nan
    for turn in range(turns + 1):
        step = timed_step(ops, method, bucket, grads, states)
        states = step.states
        if turn:  # in the first, memory is new
            steps.append(step)
            copies.append(seconds(copy))
        else:
            exact = np.mean(np.stack(grads), axis=0, dtype=np.float64)
            vnmse = error(np.asarray(step.total, np.float64) / len(grads), exact)[0]
    encode, decode, plain = (median(x) for x in ([s.encode for s in steps], [s.decode for s in steps], copies))
    bits = 8 * median(step.sent for step in steps) / bucket.numel
    return Line(spec, 1000 * encode, 1000 * decode, encode / plain, decode / plain, bits, vnmse)


def timed_step(
    ops: Ops, method: Method, bucket: Bucket, grads: Sequence[Floats], states: Sequence[State], rank: int = 0
) -> Step:
    """Run a step of all ranks and time one of them."""
    sent: list[int] = []
    flights = fly(ops, method, bucket, grads, states, lambda message: sent.append(message.array.nbytes))
    *encode, decode = flights[rank].laps
    begin = time.perf_counter()
    total = dense(ops, flights[rank].ended.total)
    decode += time.perf_counter() - begin
    return Step(sum(encode), decode, sum(sent), total, [flight.ended.state for flight in flights])


def _ops() -> Ops:
    compiled()  # says what is missing
    from hvd_compress.ops.numpy_compiled import NumpyCompiledOps

    return NumpyCompiledOps()
