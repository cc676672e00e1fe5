"""Links over Horovod: allgathers of a process set of two ranks, to which only the sender has something to add."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import sys
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch

from hvd_compress.errors import BUILD_HOROVOD, BoundaryError, MissingPackageError, SpecError, UnsupportedError
from hvd_compress.pipeline.torch.end import silence
from hvd_compress.pipeline.wire import Bytes

try:
    import horovod.torch as hvd
    from horovod.common.exceptions import HorovodInternalError
except ImportError as error:
    raise MissingPackageError(
        f"link='horovod', and several replicas, need a Horovod built for PyTorch ({error}): {BUILD_HOROVOD}"
    ) from error

_NAP = 0.0002
"""Seconds between looks at Horovod while nothing moves."""

_NAMES = 256
"""After so many messages names come again; there are never as many under way."""

_SETS: dict[tuple[int, ...], hvd.ProcessSet] = {}
"""Process sets so far, as Horovod creates each only once."""


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks.

    Raises:
        SpecError: If Horovod has not been initialised.
    """
    _require()
    return hvd.rank(), hvd.size()


def process_set(ranks: list[int]) -> hvd.ProcessSet:
    """Return the process set of some ranks; all ranks must ask for the same sets in the same order.

    Raises:
        SpecError: If Horovod has not been initialised.
        UnsupportedError: If it was initialised without dynamic process sets.
    """
    _require()
    if len(ranks) == hvd.size():
        return hvd.global_process_set
    known = _SETS.get(tuple(ranks))
    if known is None or known.process_set_id is None:  # Horovod forgets them when it is shut down
        try:
            known = _SETS[tuple(ranks)] = hvd.add_process_set(ranks)
        except ValueError as error:
            raise UnsupportedError(
                f"Horovod cannot make the process set of ranks {ranks} ({error}): initialise it with"
                ' hvd.init(process_sets="dynamic"), and leave sets of these ranks to the pipeline'
            ) from error
    return known


def _require() -> None:
    if not hvd.is_initialized():
        raise SpecError(
            "link='horovod', and several replicas, need an initialised Horovod: call"
            ' hvd.init(process_sets="dynamic") before'
        )
    atexit.unregister(_leave_together)
    atexit.register(_leave_together)  # after Horovod's own, so that it is done before


def _leave_together() -> None:
    """Wait for all ranks at the end of the program, as Horovod ends as soon as one stage leaves.

    A rank that ends by an exception leaves at once, so that others learn of it; nobody waits for longer than a minute.
    """
    if hvd.is_initialized() and not hasattr(sys, "last_value"):
        with contextlib.suppress(HorovodInternalError):
            nothing = torch.zeros(1, dtype=torch.float32, device="cpu")
            _wait(hvd.allreduce_async(nothing, name="hvd_compress.pipeline.end"), timeout=60)


class HorovodLink:
    """See `hvd_compress.pipeline.torch.end.Link`.

    Args:
        pair: The process set of the two ranks.
        name: Name of the link, the same at both ends.
        ahead: Whether this end is the one that sends activations.
        peer: Words for the other end.
    """

    def __init__(self, pair: hvd.ProcessSet, name: str, ahead: bool, peer: str) -> None:
        self.peer = peer
        self._pair = pair
        directions = [f"{name}.forward", f"{name}.backward"]
        outgoing, incoming = directions if ahead else reversed(directions)
        self._outgoing, self._incoming = _names(outgoing), _names(incoming)
        self._leaving: deque[int] = deque()
        self._arriving: deque[int] = deque()

    def send(self, data: Bytes) -> None:
        """Start to send a message."""
        while self._leaving and hvd.poll(self._leaving[0]):
            hvd.synchronize(self._leaving.popleft())
        self._leaving.append(self._gather(data, next(self._outgoing)))

    def expect(self, count: int) -> None:
        """Take part in the next ``count`` allgathers of the other end."""
        for _ in range(count - len(self._arriving)):
            self._arriving.append(self._gather(np.empty(0, np.uint8), next(self._incoming)))

    def receive(self, timeout: float) -> Bytes:
        """Return the next message."""
        handle = self._arriving.popleft()
        if not _wait(handle, timeout):
            raise BoundaryError(silence(self.peer, timeout))
        try:
            data: Bytes = hvd.synchronize(handle).numpy()
        except HorovodInternalError as error:
            raise BoundaryError(f"Horovod lost the connection to {self.peer}, whose process may have ended") from error
        return data

    def flush(self, timeout: float) -> None:
        """Wait until all messages have been sent, but at most ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while self._leaving and _wait(self._leaving[0], end - time.monotonic()):
            self._leaving.popleft()

    def _gather(self, data: Bytes, name: str) -> int:
        try:
            handle: int = hvd.allgather_async(torch.from_numpy(data), name=name, process_set=self._pair)
        except HorovodInternalError as error:
            raise BoundaryError(f"Horovod has been shut down; {self.peer} may have ended") from error
        return handle


def _names(direction: str) -> Iterator[str]:
    """Return the names of the messages of a direction, in order; both ends count alike."""
    return (f"{direction}.{number % _NAMES}" for number in itertools.count())


def _wait(handle: int, timeout: float) -> bool:
    """Return whether a collective is done within so many seconds."""
    end = time.monotonic() + timeout
    while not hvd.poll(handle):
        if time.monotonic() >= end:
            return False
        time.sleep(_NAP)
    return True
