"""One rank of a job of two ranks, which is gone on with by one rank, by two again, and by three (PyTorch)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import horovod.torch as hvd
import numpy as np
import torch
from parallel.pytorch.race_clock import CANDIDATES, ENOUGH, TOPK, Clock
from parallel.pytorch.training import Job, assert_ranks_equal, leaves_of

from hvd_compress.engine import autotune
from hvd_compress.torch import Compression

CLOCK = Clock()


def made(spec: str) -> Job:
    """Return a job whose steps are timed by the clock, if it is one of auto."""
    job = Job(Compression.auto(candidates=CANDIDATES, merge=2) if spec == "auto" else spec)
    CLOCK.compression, CLOCK.fastest = job.compression, TOPK
    return job


def check_choice(job: Job) -> None:
    """A job of auto goes on with the choice."""
    for race in job.compression.races().values():
        assert race.choice == TOPK and race.comparisons == []


def first(folder: Path, spec: str) -> None:
    """Save what this rank keeps, also for comparison."""
    job = made(spec).run(ENOUGH + 30 if spec == "auto" else 3)
    job.compression.save(folder / "two")
    np.savez(folder / f"rank{hvd.rank()}.npz", **leaves_of(job.compression))


def alone(folder: Path, spec: str) -> None:
    """Train and save twice."""
    job = made(spec)
    job.compression.load(folder / "two")
    for step in range(2):
        job.run(range(step, step + 1)).compression.save(folder / "one")


def second(folder: Path, spec: str) -> None:
    """Go on: each rank with what was its own."""
    job = made(spec).run(1)
    job.compression.load(folder / "one")
    leaves = leaves_of(job.compression)
    for name, leaf in np.load(folder / f"rank{hvd.rank()}.npz").items():
        np.testing.assert_array_equal(leaves[name], leaf)
    check_choice(job.run(1))


def three(folder: Path, spec: str) -> None:
    """Go on with the sum of the residuals."""
    job = made(spec).run(1)
    job.compression.load(folder / "one")
    saved = [np.load(folder / f"rank{rank}.npz") for rank in range(2)]
    for name, leaf in leaves_of(job.compression).items():
        if name.endswith(".residual"):
            expected = torch.tensor(sum(one[name] for one in saved))
            torch.testing.assert_close(hvd.allreduce(leaf, op=hvd.Sum, name=name), expected)
    check_choice(job.run(3))
    assert_ranks_equal(job.weights)


if __name__ == "__main__":
    hvd.init()
    autotune.time = CLOCK  # type: ignore[assignment, attr-defined]
    part, folder, spec = sys.argv[1:]
    {"first": first, "alone": alone, "second": second, "three": three}[part](Path(folder), spec)
    print(f"{part} done")
