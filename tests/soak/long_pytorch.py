"""One rank of a long job (PyTorch): many steps, methods and shapes, and a fault now and then.

The same round of models and methods is trained again and again, each time new, so that whatever is not given back shows
as growth from round to round.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops
from parallel.pytorch.training import everyone
from soak.report import Report, resident_mb
from torch import Tensor, nn

from hvd_compress.torch import Compression

METHODS = ["topk:ratio=0.05", "powersgd:rank=2", "int8", "efsignsgd:twoway=on", "dgc:ratio=0.05", "thc", "randomk"]
WIDTHS = [40, 72]
FAULT_EVERY = 61


def train(method: str, width: int, begin: int, steps: int) -> tuple[bool, int]:
    """Train a new model; gives whether the ranks are equal at the end, and how many faults were injected."""
    torch.manual_seed(begin)
    model = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.02),
        named_parameters=model.named_parameters(),
        compression=Compression.parse(method),
    )
    faults = 0
    for step in range(begin, begin + steps):
        generator = torch.Generator().manual_seed(1000 * step + hvd.rank())
        x = torch.randn(16, 32, generator=generator)
        bad = step % FAULT_EVERY == 0
        faults += bad
        if bad and hvd.rank() == step % hvd.size():
            x[3, 3] = float("nan")
        nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)).backward()  # type: ignore[no-untyped-call]
        optimizer.synchronize()
        if all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None) == bad:
            raise AssertionError(f"step {step}: a gradient that is not finite on one rank must be seen by all")
        with optimizer.skip_synchronize():
            if not bad:
                optimizer.step()
        optimizer.zero_grad()
    return all_equal(torch.cat([p.detach().flatten() for p in model.parameters()])), faults


def all_equal(weights: Tensor) -> bool:
    """Whether all ranks hold the same bits, and all of them are finite."""
    return bool((hvd.allgather(weights[None]) == weights).all())


def main(steps: int) -> None:
    """Train round after round."""
    hvd.init()
    torch.set_num_threads(1)
    each = -(-steps // (4 * len(METHODS) * len(WIDTHS)))
    done = faults = 0
    equal = True
    memory: list[float] = []
    while done < steps:
        for method in METHODS:
            for width in WIDTHS:
                same, more = train(method, width, done, each)
                equal, faults, done = equal and same, faults + more, done + each
        gc.collect()
        memory.append(resident_mb())
    handles = len(mpi_ops._handle_map)
    reports = everyone(Report(done, faults, memory, f"{handles} open handles", equal and not handles))
    if hvd.rank() == 0:
        Report.together(reports).write(sys.argv[2])


if __name__ == "__main__":
    main(int(sys.argv[1]))
