"""Wait asleep: cores are few where ranks share a machine."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from hvd_compress.core.transport import Handle

_NAP, _SHARE = 50e-6, 0.02
"""Seconds between two looks at what is on its way, at least; and their share of the waiting so far."""


def nap(begin: float, sleep: Callable[[float], object] = time.sleep) -> None:
    """Sleep for a moment, a longer one the longer the waiting.

    Args:
        begin: When the waiting began, of ``time.monotonic``.
        sleep: Sleeps for so many seconds; a condition's ``wait`` gives up its lock meanwhile.
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
