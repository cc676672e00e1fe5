"""One rank of a job in which another rank stalls in the middle of a step: all wait for it, and nothing else changes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import horovod.torch as hvd
import torch
from parallel.pytorch.training import Job, everyone
from torch import Tensor

STALL_SECONDS = 4
STEPS = 6


def stall(grad: Tensor) -> None:
    """Other gradients of this step are on their way by now."""
    del grad
    time.sleep(STALL_SECONDS)


def main(path: str) -> None:
    """Train with and without a stall, and compare."""
    hvd.init()
    calm, stalled = Job("powersgd:rank=2").run(STEPS), Job("powersgd:rank=2")
    for step in range(STEPS):
        if step == 3 and hvd.rank() == 1:
            hook = stalled.model.get_parameter("0.weight").register_hook(stall)  # type: ignore[no-untyped-call]
        stalled.run(range(step, step + 1))
        if step == 3 and hvd.rank() == 1:
            hook.remove()
    same = everyone(torch.equal(calm.weights, stalled.weights))
    if hvd.rank() == 0:
        Path(path).write_text(json.dumps({"equal": all(same), "stall": STALL_SECONDS}))


if __name__ == "__main__":
    main(sys.argv[1])
