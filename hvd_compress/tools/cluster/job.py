"""The processes of a job, until all have ended or one has failed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NamedTuple

_GRACE = 10.0
"""Seconds that a process has to end by itself, once another has failed."""


class Finished(NamedTuple):
    """A process that has ended."""

    host: str  # The name of the host, as ``"h1"``
    code: int  # The exit code; negative if a signal ended it
    output: str


class Process:
    """A program on a host; its output goes to a file, so that it never waits for a reader.

    Args:
        host: The name of the host, for `Finished`.
        command: The program and its arguments.
        environment: All of its environment.
        orphaned: The signal that it gets when this process is killed.
    """

    def __init__(
        self,
        host: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        orphaned: signal.Signals = signal.SIGKILL,
    ) -> None:
        self.host = host
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [*_ends_with_us(orphaned), *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which ends the hosts
        )

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self.process.poll()

    def signal(self, kind: signal.Signals) -> None:
        """Send a signal to it and to all that it has started."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, kind)

    def output(self) -> str:
        """Return what it has printed so far."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def finished(self) -> Finished:
        """Wait for its end."""
        code = self.process.wait()
        output = self.output()
        self._output.close()
        return Finished(self.host, code, output)


def _ends_with_us(kind: signal.Signals) -> list[str]:
    """Return a prefix that makes a command get a signal when this process is killed; empty if there is no setpriv.

    The kernel looks at the thread that starts it, which has to live as long.
    """
    found = shutil.which("setpriv")
    return [found, "--pdeathsig", kind.name.removeprefix("SIG")] if found else []


def follow(processes: Sequence[Process], timeout: float, watch: Callable[[], None]) -> list[Finished]:
    """Wait until all have ended; a failure, the time limit in seconds or an exception ends the others."""
    deadline = time.monotonic() + timeout
    try:
        while any(process.code is None for process in processes) and time.monotonic() < deadline:
            if any(process.code for process in processes):
                break
            watch()
            time.sleep(0.05)
    finally:
        end(processes)
    return [process.finished() for process in processes]


def end(processes: Sequence[Process]) -> None:
    """End what still runs: by SIGTERM, then by SIGKILL."""
    for kind in (signal.SIGTERM, signal.SIGKILL):  # horovodrun passes the first on to its ranks
        for process in processes:
            process.signal(kind)
        deadline = time.monotonic() + _GRACE
        while any(process.code is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.02)
