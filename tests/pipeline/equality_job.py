"""A model that is split over ranks is the whole model. Arguments: link, replicas, numbers of microbatches."""

from __future__ import annotations

import sys

import torch
from job_support import SAMPLES, batch, begin, stages
from torch import nn

from hvd_compress.pipeline.torch import Pipeline

link, replicas = sys.argv[1], int(sys.argv[2])
hvd, size = begin(link, replicas)
count = size // replicas


def check(microbatches: int) -> Pipeline:
    """Train both, and compare losses, weights and outputs."""
    pipeline = Pipeline(
        stages(count),
        nn.functional.cross_entropy,
        microbatches=microbatches,
        link=link,  # type: ignore[arg-type]
    )
    optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=0.3, momentum=0.9)
    if pipeline.replicas is not None:
        named = [(f"stage{pipeline.stage}.{name}", p) for name, p in pipeline.module.named_parameters()]
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=named, process_set=pipeline.replicas, backward_passes_per_step=microbatches
        )
    whole = nn.Sequential(*stages(count))
    reference = torch.optim.SGD(whole.parameters(), lr=0.3, momentum=0.9)

    for step in range(4):
        inputs, targets = batch(step, SAMPLES * replicas)
        reference.zero_grad()
        expected = nn.functional.cross_entropy(whole(inputs), targets)
        expected.backward()  # type: ignore[no-untyped-call]
        reference.step()

        mine = slice(pipeline.replica * SAMPLES, (pipeline.replica + 1) * SAMPLES)
        optimizer.zero_grad()
        loss = pipeline.step(inputs[mine], targets[mine])
        optimizer.step()
        assert (loss is not None) == pipeline.is_last
        if replicas == 1 and pipeline.is_last:
            torch.testing.assert_close(torch.tensor(loss), expected.detach())
        for p, q in zip(pipeline.module.parameters(), whole[pipeline.stage].parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)

    outputs = pipeline.evaluate(inputs if pipeline.is_first else None)
    assert (outputs is not None) == pipeline.is_last
    if outputs is not None:
        torch.testing.assert_close(outputs, whole(inputs), rtol=1e-5, atol=1e-6)
    for traffic in pipeline.stats().values():
        assert traffic.forward.messages == traffic.backward.messages == 4 * microbatches
    return pipeline


for number in map(int, sys.argv[3:]):
    done = check(number)
print(f"all is well on rank {done.replica * count + done.stage}")
