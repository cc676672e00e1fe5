"""Training with DistributedDataParallel, and what is compared after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import horovod.torch as hvd
import torch
import torch.distributed as dist
from parallel.pytorch.training import batch, make_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.distributed import Compression, DistributedCompressor


@contextmanager
def group_of(ranks: int, place: str) -> Iterator[None]:
    """The default process group, of the first ranks, which meet in a file."""
    patience = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=hvd.rank(), world_size=ranks, timeout=patience)
    yield
    dist.barrier()
    dist.destroy_process_group()


def train(
    compression: DistributedCompressor | str | None,
    steps: range = range(6),
    model: nn.Module | None = None,
    accumulate: bool = False,
    **options: Any,
) -> nn.Module:
    """Train with DDP; return the model."""
    model = make_model() if model is None else model
    wrapped = DistributedDataParallel(model, **options)
    if compression is not None:
        made = Compression.parse(compression, merge=2) if isinstance(compression, str) else compression
        made.register(wrapped)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        if accumulate:
            with wrapped.no_sync():
                loss_of(wrapped, step + 100).backward()  # type: ignore[no-untyped-call]
        loss_of(wrapped, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return model


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return nn.functional.cross_entropy(model(x), y)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def assert_same_states(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["sessions"].keys() == other["sessions"].keys()
    for label, session in one["sessions"].items():
        buckets = other["sessions"][label]["buckets"]
        for key, leaves in session["buckets"].items():
            assert leaves.keys() == buckets[key].keys()
            for path, leaf in leaves.items():
                assert torch.equal(torch.as_tensor(leaf), torch.as_tensor(buckets[key][path])), (key, path)
