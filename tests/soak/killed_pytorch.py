"""One rank of a job in which another rank is killed in the middle of an exchange (PyTorch)."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from parallel.pytorch.training import Job

from hvd_compress.torch.horovod.transport import HorovodTransport

FATAL_STEP = 4


def die_between_the_rounds() -> None:
    """The next exchange of this process is its last: it launches the first round of a bucket and never comes back."""
    transport: Any = HorovodTransport
    start = transport.start

    def started(*args: Any) -> Any:
        start(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    transport.start = started


def main(folder: str) -> None:
    """Train until the others are gone; leave word of how it ended."""
    hvd.init()
    word = Path(folder, f"rank{hvd.rank()}")
    job = Job("int8").run(FATAL_STEP)
    if hvd.rank() == 1:
        die_between_the_rounds()
    try:
        job.run(1)
        word.write_text("a step without the killed rank was finished")
    except HorovodInternalError as error:
        word.write_text(f"HorovodInternalError: {error}")
        raise


if __name__ == "__main__":
    main(sys.argv[1])
