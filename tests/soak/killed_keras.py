"""One rank of a job in which another rank is killed in the middle of an exchange (TensorFlow)."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import horovod.tensorflow as hvd
import tensorflow as tf
from parallel.keras.training import Tape

from hvd_compress.tensorflow.transport import GraphTransport

FATAL_STEP = 4


def die_between_the_rounds() -> None:
    """Graphs that are built from now on have a trap in front of each allreduce of integers: the second round."""
    transport: Any = GraphTransport
    start = transport.start
    calls = tf.Variable(0)

    def trapped(self: Any, message: Any, name: str) -> Any:
        if message.array.dtype in (tf.int32, tf.int64) and not name.endswith("finite"):
            with tf.control_dependencies([tf.py_function(trap, [message.array], [])]):
                message = message._replace(array=tf.identity(message.array))
        return start(self, message, name)

    def trap(_: Any) -> None:
        if calls.assign_add(1) > FATAL_STEP:
            os.kill(os.getpid(), signal.SIGKILL)

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
