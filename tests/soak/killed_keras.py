"""One rank of a job in which another rank is killed in the middle of an exchange (TensorFlow)."""

from __future__ import annotations

import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from parallel.keras.training import Tape

from hvd_compress.core.collectives import AllReduce
from hvd_compress.tensorflow.transport import EagerTransport

FATAL_STEP = 4


def die_between_the_rounds() -> None:
    """Set a trap in front of each allreduce of integers of the exchanges: the second round."""
    transport: Any = EagerTransport
    start, calls = transport.start, count(1)

    def trapped(self: Any, message: Any, name: str) -> Any:
        integers = isinstance(message, AllReduce) and message.array.dtype in (np.int32, np.int64)
        if integers and "verdict" not in name and next(calls) > FATAL_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        return start(self, message, name)

    transport.start = trapped


def main(folder: str) -> None:
    """Train until the others are gone; leave word of how it ended."""
    hvd.init()
    word = Path(folder, f"rank{hvd.rank()}")
    if hvd.rank() == 1:
        die_between_the_rounds()
    job = Tape("int8").run(FATAL_STEP)
    try:
        job.run(1)
        word.write_text("a step without the killed rank was finished")
    except tf.errors.OpError as error:
        word.write_text(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(sys.argv[1])
