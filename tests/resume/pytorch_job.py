"""One rank of a job that is saved at step 20 and goes on to step 40 in new processes (PyTorch)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import horovod.torch as hvd
import torch
from parallel.pytorch.training import Job


def first(spec: str, folder: Path) -> None:
    """Train to step 40 without a break; train another job to step 20 and save it."""
    torch.save(Job(spec).run(40).weights, folder / "whole.pt")
    job = Job(spec).run(20)
    parts = {"model": job.model, "optimizer": job.optimizer, "compression": job.compression}
    torch.save({name: part.state_dict() for name, part in parts.items()}, folder / "saved.pt")


def second(spec: str, folder: Path) -> None:
    """Go on from step 20 and compare."""
    saved = torch.load(folder / "saved.pt", weights_only=True)
    job = Job(spec)
    job.model.load_state_dict(saved["model"])
    job.optimizer.load_state_dict(saved["optimizer"])
    job.compression.load_state_dict(saved["compression"])
    weights = job.run(range(20, 40)).weights
    assert torch.equal(weights, torch.load(folder / "whole.pt", weights_only=True)), f"{spec}: not the same bits"


if __name__ == "__main__":
    hvd.init()
    for spec in sys.argv[3:]:
        place = Path(sys.argv[2], spec.replace(":", "_"), str(hvd.rank()))
        place.mkdir(parents=True, exist_ok=True)
        {"first": first, "second": second}[sys.argv[1]](spec, place)
    print(f"{sys.argv[1]} done on rank {hvd.rank()}")
