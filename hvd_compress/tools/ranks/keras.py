"""A rank in TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress.tools.ranks.process import Device
from hvd_compress.tools.ranks.rank import Rank


class KerasRank(Rank):
    def __init__(self, specs: Sequence[str], device: Device) -> None:
        super().__init__(hvd, specs, device)

    def gather(self, values: list[float]) -> list[list[float]]:
        """Return the values of all ranks."""
        found: list[list[float]] = hvd.allgather(tf.constant([values], tf.float64), name="gather").numpy().tolist()
        return found
