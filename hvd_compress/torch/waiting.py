"""Wait for collectives asleep, to leave the core to other ranks of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from hvd_compress.core.transport import Handle

_NAP, _SHARE = 50e-6, 0.02
"""Polling interval: its minimum in seconds, and as a share of the time waited so far."""


def nap(begin: float, sleep: Callable[[float], object] = time.sleep) -> None:
    """Sleep for one polling interval, which grows with the time waited.

    Args:
        begin: Start of the wait, from ``time.monotonic``.
        sleep: Sleeps for the given seconds; the ``wait`` of a condition releases its lock meanwhile.
    """
    sleep(max(_NAP, _SHARE * (time.monotonic() - begin)))


def wait(handle: Handle, sleep: Callable[[float], object] = time.sleep) -> Tensor:
    """Wait for a collective and return its reply.

    Args:
        handle: The collective.
        sleep: See `nap`.
    """
    begin = time.monotonic()
    while not handle.done():
        nap(begin, sleep)
    reply: Tensor = handle.result()
    return reply
