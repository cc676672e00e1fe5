"""A rank that has run out of data: an error on the others, where Horovod itself would hang.

This file has a job of its own, see `parallel/run.py`.
"""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch
from parallel.pytorch.training import Job, everyone

from hvd_compress.errors import UnsupportedError
from hvd_compress.torch import Compression

SPECS = ["topk:ratio=0.05", "powersgd:rank=2", "onebit:twoway=on"]
"""Of an allgather, of allreduces alone, and of an alltoall."""


@pytest.mark.parametrize("spec", SPECS)
def test_a_rank_that_has_joined(spec: str) -> None:
    """The first steps fill Horovod's cache of what is exchanged, for which it does not ask again."""
    job, message = Job(spec, momentum=0).run(3), ""
    before = job.weights
    if hvd.rank() > 0:
        with pytest.raises(UnsupportedError) as error:
            job.run(1)
        message = str(error.value)
    hvd.join()
    assert [("hvd.join()" in other) for other in everyone(message)] == [False] + [True] * (hvd.size() - 1)
    assert torch.equal(job.weights, before)
    job.optimizer.load_state_dict(job.optimizer.state_dict())
    job.optimizer.zero_grad()
    job.run(2)  # together again


@pytest.mark.parametrize("options", [{"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}, {"groups": 2}])
def test_the_factor_of_the_reduction_does_not_matter(options: dict[str, Any]) -> None:
    job = Job("topk:ratio=0.05", lr=0.01, **options).run(2)
    if hvd.rank() > 0:
        with pytest.raises(UnsupportedError, match=r"hvd\.join"):
            job.run(1)
    hvd.join()


def test_direct_calls() -> None:
    compression, tensor = Compression.topk(ratio=0.1, min_size=0), torch.ones(8, 8)

    def call() -> None:
        hvd.allreduce(tensor, name="join.x", op=hvd.Sum, prescale_factor=0.5, compression=compression)

    for _ in range(3):
        call()
    if hvd.rank() > 0:
        with pytest.raises(UnsupportedError, match=r"hvd\.join"):
            call()
    hvd.join()
