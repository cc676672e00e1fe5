"""Wait for collectives asleep, to leave the core to other ranks of the machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

from torch import Tensor

from hvd_compress.transport.protocol import Handle

_NAP, _SHARE = 50e-6, 0.02
"""Polling interval: its minimum in seconds, and as a share of the time waited so far."""


class Advancing(Protocol):
    """Interface of what advances while others wait."""

    def advance(self, advanced: object) -> None:
        """Advance the running step without waiting, unless it is this one."""


class StepLock(threading.Condition):
    """Lock of the callers of one or several reducers, whose running steps all advance while one of them waits.

    Ranks may wait for different steps first, so each must go on with all of them.

    Attributes:
        running: Reducers with a running step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running: WeakSet[Advancing] = WeakSet()

    def sleep(self, seconds: float, advanced: object = None) -> None:
        """Advance all running steps, then release the lock for some seconds.

        Args:
            seconds: The seconds.
            advanced: A step that its caller has just advanced.
        """
        for one in list(self.running):
            one.advance(advanced)
        self.wait(seconds)


def nap(begin: float, sleep: Callable[[float], object] = time.sleep) -> None:
    """Sleep for one polling interval, which grows with the time waited.

    Args:
        begin: Start of the wait, from ``time.monotonic``.
        sleep: Sleeps for the given seconds; see `StepLock.sleep`.
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
