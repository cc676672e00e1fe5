"""The race of ``auto`` on the ranks that run this program: real exchanges of a model's gradients, without training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.distributed import Compression
from hvd_compress.engine.race import Comparison
from hvd_compress.errors import SpecError
from hvd_compress.tools.advise.models import NormalModel, own_model, squares
from hvd_compress.tools.advise.request import Request
from hvd_compress.tools.ranks.group import GroupRank
from hvd_compress.tools.ranks.process import Device


def race(request: Request, device: Device) -> tuple[GroupRank, Comparison]:
    """Compare the candidates.

    Returns:
        This rank, and the comparison, of which the times are those of rank 0.

    Raises:
        SpecError: If there is a single rank, or the function does not make a model.
    """
    rank = GroupRank([], device)
    if rank.size < 2:
        raise SpecError("advise measures the exchange of at least 2 ranks: torchrun --nproc-per-node 2, or more nodes")
    model, loss = _made(request, rank.rank)
    model.to(rank.device)
    compression = Compression.auto(loss=request.loss, candidates=request.candidates)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.0)
    compression.register(wrapped, optimizer=None if request.adam else optimizer)
    while not (found := [one for of in compression.races().values() for one in of.comparisons if one.steps]):
        optimizer.zero_grad()
        loss(wrapped).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return rank, found[0]


def _made(request: Request, rank: int) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return the model, and the function from its wrapped form to a loss."""
    shapes: list[tuple[int, ...]] = [*squares(request.params, request.side)]
    if request.model:
        model, loss = own_model(request.model)
        if loss is not None:
            return model, loss
        shapes = [tuple(one.shape) or (1,) for one in model.parameters() if one.requires_grad]
    return NormalModel(shapes, request.compute, rank), nn.Module.__call__
