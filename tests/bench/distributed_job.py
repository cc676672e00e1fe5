"""What the worker of the speed benches does, on two ranks; started by test_distributed_jobs.py under horovodrun.

The gradients that an exchange hands out are reduced to their mean and are there unchanged for the next step, and those
of the models reach all parameters.
"""

from __future__ import annotations

import sys
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvd_compress.tools.bench.distributed.task import ALONE, Entry
from hvd_compress.tools.bench.distributed.torch_worker import TorchBench


def gradients(subject: Any) -> list[Any]:
    return [parameter.grad.numpy().copy() for parameter in subject.parameters]


def exchanges(bench: TorchBench) -> None:
    alone = bench.make(Entry(ALONE), "exchange", "small")
    alone.step()
    mine = gradients(alone)
    means = [hvd.allreduce(torch.from_numpy(grad), name=f"mean{i}").numpy() for i, grad in enumerate(mine)]
    assert not np.array_equal(mine[0], means[0])
    entries = [Entry("a", "none", own=True), Entry("b", "none"), Entry("c", "topk:ratio=1", merge="layer")]
    subjects = [bench.make(entry, "exchange", "small") for entry in entries]
    for _ in range(2):
        for subject in subjects:
            assert subject.step() > 0
            for got, mean in zip(gradients(subject), means, strict=True):
                np.testing.assert_allclose(got, mean, rtol=1e-6)
            subject.release()
    assert all(subject.called for subject in subjects)
    stats = [subject.stats() for subject in subjects]
    assert [found and found.steps for found in stats] == [None, 2, 2]


def models(bench: TorchBench) -> None:
    before = None
    for model in ("linear", "mlp", "resnet50", "many"):
        subject = bench.make(Entry("a", "none", own=True), "steps", model)
        before = [parameter.detach().numpy().copy() for parameter in subject.parameters]
        assert subject.step() > 0
        for parameter, was in zip(subject.parameters, before, strict=True):
            assert np.isfinite(parameter.detach().numpy()).all()
            assert not np.array_equal(parameter.detach().numpy(), was), (model, tuple(was.shape))
        other = bench.make(Entry(ALONE), "steps", model)
        shared = [parameter.data_ptr() for parameter in other.parameters]
        assert shared == [parameter.data_ptr() for parameter in subject.parameters]


if __name__ == "__main__":
    worker = TorchBench([], "cpu")
    exchanges(worker)
    models(worker)
    print(f"all is well on rank {worker.rank}")
    sys.stdout.flush()
