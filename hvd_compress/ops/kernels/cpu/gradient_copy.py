"""Copy gradients in and out: with a check for inf and nan, momentum, and scaling."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numba import carray, types  # type: ignore[attr-defined]

from hvd_compress.ops.kernels.cpu.bits import MAGNITUDE, bits_of, pointer_to
from hvd_compress.ops.kernels.cpu.compiled import FLAG, FLOAT, FLOATS, FLOATS_OUT, INDICES, INT, NOTHING, loop, part
from hvd_compress.ops.packing import GROUP

Floats: TypeAlias = npt.NDArray[np.float32]
Places: TypeAlias = npt.NDArray[np.int64]

_INF = np.uint32(0x7F800000)
_LIMIT = int(_INF)
"""The same as a Python float, which compares four times as fast outside of loops."""


def put_finite(out: Floats, grad: Floats) -> bool:
    """Copy a gradient; if anything of it is inf or nan, write zeros instead.

    Returns:
        Whether all of it was finite.
    """
    finite = bool(_put(grad, out) < _LIMIT)
    if not finite:
        out.fill(0)
    return finite


@part
def _floats_at(address: Any, n: Any) -> Any:
    return carray(pointer_to(types.uintp(address)), (n,), np.float32)


def accelerate(
    x: Floats, velocity: Floats, residual: Floats, momentum: float, nesterov: bool, out: Floats | None = None
) -> tuple[Floats, Floats]:
    """Momentum, and what has piled up of it, as `Ops.accelerate` gives; the latter is written to ``out``.

    ``out`` may be ``x``.
    """
    fast, piled = np.empty_like(velocity), np.empty_like(x) if out is None else out
    _accelerate(x, velocity, residual, np.float32(momentum), nesterov, fast, piled)
    return fast, piled


@part
def _copied(grad: Any, out: Any) -> Any:
    """Copy; the largest magnitude, as its bits."""
    peak, some = np.uint32(0), np.empty(GROUP, np.float32)
    for start in range(0, out.size, GROUP):
        stop = min(start + GROUP, out.size)
        g, o = grad[start:stop], out[start:stop]
        for i in range(stop - start):
            some[i] = g[i]
        for i in range(stop - start):
            peak = max(peak, np.uint32(bits_of(some[i]) & MAGNITUDE))
            o[i] = some[i]
    return peak


@loop(types.uint32, FLOATS, FLOATS_OUT)
def _put(grad: Any, out: Any) -> Any:
    return _copied(grad, out)


@loop(NOTHING, FLOATS, FLOATS, FLOATS, FLOAT, FLAG, FLOATS_OUT, FLOATS_OUT)
def _accelerate(x: Any, velocity: Any, residual: Any, momentum: Any, nesterov: Any, fast: Any, piled: Any) -> None:
    u, p = np.empty(GROUP, np.float32), np.empty(GROUP, np.float32)
    for start in range(0, x.size, GROUP):
        stop = min(start + GROUP, x.size)
        a, v, r = x[start:stop], velocity[start:stop], residual[start:stop]
        if nesterov:
            for i in range(stop - start):
                u[i] = (v[i] + a[i]) * momentum
                p[i] = (r[i] + u[i]) + a[i]
        else:
            for i in range(stop - start):
                u[i] = v[i] * momentum + a[i]
                p[i] = r[i] + u[i]
        fast[start:stop] = u[: stop - start]
        piled[start:stop] = p[: stop - start]


def put_finite_at(out: int, grad: int, n: int) -> bool:
    """`put_finite` for ``n`` float32 at two addresses: small arrays take less time than to ask them where they lie."""
    return bool(_put_at(out, grad, n) < _LIMIT)


@loop(types.uint32, INT, INT, INT)
def _put_at(out: Any, grad: Any, n: Any) -> Any:
    to, given = _floats_at(out, n), _floats_at(grad, n)
    peak = _copied(given, to)
    if peak >= _INF:
        to[:] = np.float32(0)
    return peak


def absorb_at(out: int, residual: int, grad: int, n: int, scale: float) -> bool:
    """Write ``residual + grad / scale``; the residual alone if that gradient is not finite.

    Args:
        out: Address of ``n`` float32.
        residual: Address of ``n`` float32.
        grad: Address of ``n`` float32.
        n: How many.
        scale: By which the gradient is too large.

    Returns:
        Whether all of ``grad / scale`` was finite.
    """
    return bool(_absorb_at(out, residual, grad, n, scale) < _LIMIT)


@loop(types.uint32, INT, INT, INT, INT, types.float64)  # what Python's numbers are; others would have to be converted
def _absorb_at(out: Any, residual: Any, grad: Any, n: Any, divisor: Any) -> Any:
    to, kept, given, scale = _floats_at(out, n), _floats_at(residual, n), _floats_at(grad, n), np.float32(divisor)
    peak, new = np.uint32(0), np.empty(GROUP, np.float32)
    for start in range(0, n, GROUP):
        stop = min(start + GROUP, n)
        o, k, g = to[start:stop], kept[start:stop], given[start:stop]
        for i in range(stop - start):
            new[i] = g[i] / scale
            peak = max(peak, np.uint32(bits_of(new[i]) & MAGNITUDE))
        for i in range(stop - start):
            o[i] = k[i] + new[i]
    if peak >= _INF:
        to[:] = kept
    return peak


def deliver(total: Floats, starts: Places, addresses: Places, sizes: Places, factor: float) -> bool:
    """Write pieces of a sum, times a factor, to other places.

    Args:
        total: The sum.
        starts: Where each piece begins in it; int64.
        addresses: Where each is to go, float32 there as well; int64.
        sizes: How many numbers each has; int64.
        factor: By which all are multiplied.

    Returns:
        Whether all that was written is finite.
    """
    return bool(_deliver(total, starts, addresses, sizes, factor) < _LIMIT)


@loop(types.uint32, FLOATS, INDICES, INDICES, INDICES, FLOAT)
def _deliver(total: Any, starts: Any, addresses: Any, sizes: Any, factor: Any) -> Any:
    peak = np.uint32(0)
    for piece in range(starts.size):
        here = total[starts[piece] : starts[piece] + sizes[piece]]
        out = _floats_at(addresses[piece], sizes[piece])
        for start in range(0, here.size, GROUP):
            stop = min(start + GROUP, here.size)
            h, o = here[start:stop], out[start:stop]
            for i in range(stop - start):
                o[i] = h[i] * factor
            for i in range(stop - start):
                peak = max(peak, np.uint32(bits_of(o[i]) & MAGNITUDE))
    return peak
