"""One rank sends what cannot be: all refuse it in that step, in the same words, and can go on as if it had not."""

from __future__ import annotations

import re
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from parallel.keras.test_catalogue import Reduction, gradients
from parallel.keras.training import assert_ranks_equal, everyone

LENGTH, INDEX = "a payload has the wrong length", "rank 1 sent indices that do not ascend within 0 .. 1199"
NUMBER = "a payload says that it has a negative number of indices"


class Fault:
    """Damages what this rank gathers, as its variables say while the graph runs.

    Attributes:
        cut: How many bytes are missing at the end.
        first: Put in the place of each of the first four bytes, unless it is 0.
        last: The same for the last two.
    """

    def __init__(self) -> None:
        self.cut, self.first, self.last = (tf.Variable(0) for _ in range(3))
        self._gather = hvd.allgather

    def allgather(self, tensor: Any, name: str, **options: Any) -> Any:
        """Horovod's, of damaged data: those of one of three buckets."""
        if ".b1." in name:
            place, size = tf.range(tf.size(tensor)), tf.size(tensor)
            tensor = tf.where((place < 4) & (self.first > 0), tf.cast(self.first, tf.uint8), tensor)
            tensor = tf.where((place >= size - 2) & (self.last > 0), tf.cast(self.last, tf.uint8), tensor)
            tensor = tensor[: size - self.cut]
        return self._gather(tensor, name=name, **options)


@pytest.mark.parametrize(
    ("spec", "faults"),
    [
        ("topk:ratio=0.05", {"cut": (1, LENGTH), "last": (255, INDEX)}),
        pytest.param("threshold:threshold=2", {"cut": (6, LENGTH), "first": (255, NUMBER)}, marks=pytest.mark.long),
    ],
)
def test_a_damaged_payload_is_refused_by_all_and_leaves_no_trace(
    spec: str, faults: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault()
    if hvd.rank() == 1:
        monkeypatch.setattr(hvd, "allgather", fault.allgather)
    graph = Reduction(spec)
    monkeypatch.undo()
    start = graph.state()
    calm = [graph.step(gradients(step)) for step in range(len(faults))]
    for path, variable in graph.slots().items():
        variable.assign(start[path])

    for step, (kind, (value, message)) in enumerate(faults.items()):
        before, said = graph.state(), ""
        getattr(fault, kind).assign(value)
        try:
            graph.step(gradients(99))
        except tf.errors.InvalidArgumentError as error:
            said = "".join(re.findall(r"assertion failed: \[(.*?)\]", str(error))[:1])
        getattr(fault, kind).assign(0)
        assert everyone(said) == [said] * hvd.size()
        assert message in said and "compare" in said
        for path, leaf in graph.state().items():
            np.testing.assert_array_equal(leaf, before[path], err_msg=path)
        for name, mean in graph.step(gradients(step)).items():
            np.testing.assert_array_equal(mean, calm[step][name], err_msg=name)
            assert_ranks_equal(mean)
