"""One rank of a job of DistributedDataParallel that is saved at step 10 and goes on to step 20 in new processes.

Arguments: a part of the job, a folder that all ranks share, and specs.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.distributed import Compression, FullState
from hvd_compress.errors import StateError


class Job:
    """A training with a compressor."""

    def __init__(self, spec: str) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
        self.compression = Compression.parse(spec).register(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def run(self, steps: range) -> None:
        """Train."""
        for step in steps:
            data = torch.Generator().manual_seed(100 * step + dist.get_rank())
            x, y = torch.randn(8, 64, generator=data), torch.randint(10, (8,), generator=data)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()

    @property
    def weights(self) -> torch.Tensor:
        """All parameters, flat."""
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def save_while_training(self, folder: Path, steps: range) -> None:
        """Save everything, while the training goes on."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "compression": FullState(self.compression)}
        saving = state_dict_saver.async_save(state, checkpoint_id=folder, process_group=dist.new_group())
        self.run(steps)
        assert isinstance(saving, Future)
        saving.result()

    def load(self, folder: Path) -> None:
        """Load everything."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state_dict_loader.load(
            {"model": model, "optimizer": optimizer, "compression": FullState(self.compression)}, checkpoint_id=folder
        )
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def residuals(self) -> torch.Tensor:
        """Return the sum of the residuals of all ranks."""
        (session,) = self.compression.state_dict()["sessions"].values()
        residual = torch.cat(
            [leaves["residual"] for leaves in session["buckets"].values() if "residual" in leaves]
        ).double()
        dist.all_reduce(residual)
        return residual


def first(spec: str, folder: Path) -> None:
    """Train to step 20 without a stop; train another job to step 10 and save it."""
    whole, job = Job(spec), Job(spec)
    whole.run(range(20))
    job.run(range(10))
    residuals = job.residuals()
    state_dict_saver.save({"compression": job.compression}, checkpoint_id=folder / "of one rank")
    job.save_while_training(folder / "saved", range(10, 15))
    if dist.get_rank() == 0:
        torch.save(whole.weights, folder / "weights.pt")
        torch.save(residuals, folder / "residuals.pt")


def second(spec: str, folder: Path) -> None:
    """Go on from step 10, and compare."""
    job = Job(spec)
    job.load(folder / "saved")
    job.run(range(10, 20))
    assert torch.equal(job.weights, torch.load(folder / "weights.pt")), f"{spec}: not the same bits"


def resized(spec: str, folder: Path) -> None:
    """Load with another number of ranks."""
    job = Job(spec)
    job.run(range(1))
    job.load(folder / "saved")
    torch.testing.assert_close(job.residuals(), torch.load(folder / "residuals.pt"))
    job.run(range(10, 12))


def refused(spec: str, folder: Path) -> None:
    """Load the compressor itself: the checkpoint has the state of some rank, if any."""
    state = {"compression": Job(spec).compression}
    try:
        state_dict_loader.load(state, checkpoint_id=folder / "of one rank")
    except StateError as error:
        print(error, flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for spec in sys.argv[3:]:
        place = Path(sys.argv[2], spec.replace(":", "_"))
        place.mkdir(exist_ok=True)
        {"first": first, "second": second, "resized": resized, "refused": refused}[sys.argv[1]](spec, place)
        dist.barrier()
    print(f"{sys.argv[1]} done on rank {dist.get_rank()}", flush=True)
    dist.destroy_process_group()
