"""The bandwidths that can be emulated, and the options of ``tc`` for them."""

from __future__ import annotations

import math

from hvd_compress.errors import ClusterError, SpecError
from hvd_compress.tools.units import UNLIMITED, read_rate

_LEAST, _MOST = 100_000, 100 * 10**9

_TICK = 250
"""Some kernels refill a bucket only so often in a second."""

_PACKET = 65_600
"""Bytes of the largest packet: the device gets it whole and cuts it."""


def bits_per_second(rate: str) -> int | None:
    """Read a bandwidth.

    Returns:
        Bits per second; None if it is unlimited.

    Raises:
        ClusterError: If it cannot be read, or is out of range.
    """
    try:
        bits = read_rate("rate", rate)
    except SpecError:
        bits = 0
    if math.isinf(bits):
        return None
    if not _LEAST <= bits <= _MOST:
        raise ClusterError(
            f"rate={rate!r} is not allowed: a rate is a number with kbit, mbit or gbit, such as 100mbit or 1gbit, from"
            f" 100kbit to 100gbit; or {UNLIMITED!r}"
        )
    return round(bits)


def bucket(bits: int) -> list[str]:
    """Return the options of ``tc ... tbf`` for a rate: a bucket of one tick, and a queue of 50 ms."""
    burst = max(bits // 8 // _TICK, _PACKET)
    return ["rate", f"{bits}bit", "burst", str(burst), "limit", str(burst + bits // 8 // 20 + 200_000)]
