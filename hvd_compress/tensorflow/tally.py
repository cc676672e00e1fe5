"""Counters that a graph can update."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_compress.engine.stats import Stats
from hvd_compress.tensorflow.caller import in_session
from hvd_compress.tensorflow.transport import outside_of_graphs


class Tally(tf.Module):  # type: ignore[misc]  # TensorFlow is not typed
    """Counts steps and bytes for `Stats`, in a variable that is made on first use."""

    def __init__(self) -> None:
        super().__init__(name="hvd_compress_tally")
        self.counts: tf.Variable | None = None

    def add(self, steps: int, gradient_bytes: Any, sent: Any) -> tf.Operation:
        """Count; gives the operation that does it.

        Args:
            steps: Number of steps.
            gradient_bytes: Bytes of gradients.
            sent: Payload bytes, those outside of nodes and those within nodes: two numbers.
        """
        if in_session():
            return tf.no_op()
        if self.counts is None:
            self.counts = outside_of_graphs(lambda: tf.Variable([0, 0, 0, 0], dtype=tf.int64, trainable=False))
        return self.counts.assign_add(
            tf.stack([tf.cast(number, tf.int64) for number in (steps, gradient_bytes, *tf.unstack(sent, 2))])
        )

    def read(self) -> Stats:
        """The totals so far."""
        counts = (0, 0, 0, 0) if self.counts is None else map(int, self.counts.numpy())
        steps, gradient_bytes, bytes_sent, inside = counts
        ratio = gradient_bytes / bytes_sent if bytes_sent else 1.0
        return Stats(steps, gradient_bytes, bytes_sent, ratio, None, None, None, bytes_inside=inside)
