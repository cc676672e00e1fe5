"""One rank of a job in which the last rank has nothing to do: it joins before the others have traced anything."""

from __future__ import annotations

import sys

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress.tensorflow import Compression


def main(spec: str) -> None:
    """Sum gradients of 1 in two steps, over all ranks but the last."""
    hvd.init()
    variable = tf.Variable(tf.zeros((40, 50)))

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable)
        tape = hvd.DistributedGradientTape(tape, compression=Compression.parse(spec), op=hvd.Sum)
        variable.assign_add(tape.gradient(loss, [variable])[0])

    for _ in range(2 if hvd.rank() < hvd.size() - 1 else 0):
        step()
    hvd.join()
    print(f"rank {hvd.rank()} has {float(tf.reduce_max(variable)):g}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
