"""A compressed pipeline does bit for bit what boundaries inside one process do. Arguments: link."""

from __future__ import annotations

import sys

import torch
from job_support import SAMPLES, batch, begin, stages
from torch import nn

from hvd_compress.pipeline.torch import CompressedBoundary, Pipeline

link = sys.argv[1]
_, size = begin(link)
MICROBATCHES = 3

CASES: list[dict[str, object]] = [
    {"forward": "topk:ratio=0.3", "backward": "qsgd:bits=8"},
    {"forward": "topk:ratio=0.3", "backward": "shared", "inference": False},
    {"forward": "minmax:bits=4", "backward": "topk:ratio=0.5", "memory": "ef"},
    {"forward": "qsgd:bits=4", "backward": "minmax:bits=6", "memory": "ef21"},
    {"forward": "topk:ratio=0.2", "backward": "fp16", "memory": "aqsgd:samples=20"},
    {"forward": "powersgd:rank=1,min_gain=0", "backward": "threshold:threshold=0.001", "memory": ("none", "ef")},
]


def whole(case: dict[str, object], step: int, model: nn.ModuleList, boundaries: list[CompressedBoundary]) -> float:
    """A step of the whole model, microbatch by microbatch; the gradients add up."""
    inputs, targets = batch(step)
    ids, total = (torch.arange(SAMPLES) + 5 * step) % 20, 0.0
    parts = (t.tensor_split(MICROBATCHES) for t in (inputs, targets, ids))
    for x, labels, names in zip(*parts, strict=True):
        for stage, boundary in zip(model, [*boundaries, None], strict=True):
            x = stage(x) if boundary is None else boundary(stage(x), names if "aqsgd" in str(case) else None)
        loss = nn.functional.cross_entropy(x, labels) * (len(labels) / SAMPLES)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


for case in CASES:
    made = [CompressedBoundary(**case, name=f"boundary{place}") for place in range(size - 1)]  # type: ignore[arg-type]
    pipeline = Pipeline(
        stages(size),
        nn.functional.cross_entropy,
        boundary=CompressedBoundary(**case),  # type: ignore[arg-type]
        microbatches=MICROBATCHES,
        link=link,  # type: ignore[arg-type]
    )
    model = nn.ModuleList(stages(size))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (pipeline.module, model)]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = whole(case, step, model, made)
        inputs, targets = batch(step)
        loss = pipeline.step(
            inputs if pipeline.is_first else None,
            targets if pipeline.is_last else None,
            (torch.arange(SAMPLES) + 5 * step) % 20 if pipeline.is_first and "aqsgd" in str(case) else None,
        )
        assert loss in (None, expected), (case, loss, expected)
        for p, q in zip(pipeline.module.parameters(), model[pipeline.stage].parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad), (case, step)
        for optimizer in optimizers:
            optimizer.step()
    for name, traffic in pipeline.stats().items():
        counted = made[int(name[0])].stats()
        assert [t[:4] for t in traffic] == [t[:4] for t in counted], (case, traffic, counted)

    model.eval()
    x, outputs = inputs, pipeline.evaluate(inputs if pipeline.is_first else None)
    parts = []
    for x in inputs.tensor_split(MICROBATCHES):
        for stage, boundary in zip(model, [*made, None], strict=True):
            x = stage(x) if boundary is None else boundary.eval()(stage(x))
        parts.append(x)
    if outputs is not None:
        assert torch.equal(outputs, torch.cat(parts)), case
print(f"all is well on rank {pipeline.stage}")
