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
    """Damages what this rank gathers.

    Attributes:
        cut: How many bytes are missing at the end.
        first: Put in the place of each of the first four bytes, unless it is 0.
        last: The same for the last two.
    """

    def __init__(self) -> None:
        self.cut = self.first = self.last = 0
        self._gather = hvd.allgather

    def allgather(self, tensor: Any, name: str = "", **options: Any) -> Any:
        """Horovod's, of damaged data: those of one of three buckets."""
        data = np.array(tensor)
        if ".b1." in name:
            data[:4] = self.first or data[:4]
            data[-2:] = self.last or data[-2:]
            data = data[: len(data) - self.cut]
        return self._gather(tf.constant(data), name=name, **options)


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
    start = graph.saved()
    calm = [graph.step(gradients(step)) for step in range(len(faults))]
    graph.restore(start)

    for step, (kind, (value, message)) in enumerate(faults.items()):
        before, said = graph.leaves(), ""
        setattr(fault, kind, value)
        try:
            graph.step(gradients(99))
        except tf.errors.InvalidArgumentError as error:
            said = "".join(re.findall("ExchangeError: (.*)", str(error))[:1])
        setattr(fault, kind, 0)
        assert everyone(said) == [said] * hvd.size()
        assert message in said and "compare" in said
        tf.nest.map_structure(np.testing.assert_array_equal, graph.leaves(), before)
        for name, mean in graph.step(gradients(step)).items():
            np.testing.assert_array_equal(mean, calm[step][name], err_msg=name)
            assert_ranks_equal(mean)
