"""One rank of a job of two ranks, which is gone on with by one rank, and then by two again (PyTorch)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import horovod.torch as hvd
import numpy as np
from parallel.pytorch.training import Job, leaves_of

SPEC = "topk:ratio=0.01"


def first(folder: Path) -> None:
    """Save what this rank keeps, also for comparison."""
    job = Job(SPEC).run(3)
    job.compression.save(folder / "two")
    np.savez(folder / f"rank{hvd.rank()}.npz", **leaves_of(job.compression))


def alone(folder: Path) -> None:
    """Train and save twice."""
    job = Job(SPEC)
    job.compression.load(folder / "two")
    for step in range(2):
        job.run(range(step, step + 1)).compression.save(folder / "one")


def second(folder: Path) -> None:
    """Go on: each rank with what was its own."""
    job = Job(SPEC).run(1)
    job.compression.load(folder / "one")
    leaves = leaves_of(job.compression)
    for name, leaf in np.load(folder / f"rank{hvd.rank()}.npz").items():
        np.testing.assert_array_equal(leaves[name], leaf)
    job.run(1)


if __name__ == "__main__":
    hvd.init()
    {"first": first, "alone": alone, "second": second}[sys.argv[1]](Path(sys.argv[2]))
    print(f"{sys.argv[1]} done")
