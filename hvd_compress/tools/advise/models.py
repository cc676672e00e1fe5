"""Models whose gradients ``advise`` exchanges: of the user, or with so many parameters."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvd_compress.errors import SpecError
from hvd_compress.tools.advise.constants import Constants
from hvd_compress.tools.advise.request import Shapes
from hvd_compress.tools.bench.traffic import RMS
from hvd_compress.tools.own_code import own_function


class _Gradient(torch.autograd.Function):
    """A zero whose gradient by a parameter consists of normal numbers, and takes a time."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, noise: Tensor, seconds: float) -> Tensor:
        ctx.noise, ctx.seconds = noise.view_as(parameter), seconds
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return ctx.noise * grad, None, None


class NormalModel(nn.Module):
    """Parameters whose gradients are normal numbers.

    Args:
        shapes: Shapes of the parameters.
        compute: Seconds of a step, of which two thirds are the backward pass, evenly spread over the parameters.
        rank: Number of this rank, whose gradients are its own.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], compute: float, rank: int) -> None:
        super().__init__()
        self._all = nn.ParameterList(torch.zeros(*shape) for shape in shapes)
        most = max(map(math.prod, shapes))
        noise = RMS * torch.randn(most, generator=torch.Generator().manual_seed(rank))
        self.register_buffer("_noise", noise, persistent=False)
        self._compute = compute

    def forward(self) -> Tensor:
        """Return a loss of zero."""
        backward = Constants().backward
        time.sleep((1 - backward) * self._compute)
        gradient: Callable[[Tensor, Tensor, float], Tensor] = _Gradient.apply
        share = backward * self._compute / len(self._all)
        noise: Tensor = self._noise  # type: ignore[assignment]
        return torch.stack([gradient(p, noise[: p.numel()], share) for p in self._all]).sum()


def squares(params: int, side: int) -> list[tuple[int, int]]:
    """Return the shapes of matrices of a side that have so many parameters, or up to a row more."""
    whole, rest = divmod(params, side * side)
    return [(side, side)] * whole + ([(math.ceil(rest / side), side)] if rest else [])


def shapes_of(name: str) -> Shapes:
    """Return the shapes of a model of the user.

    Args:
        name: The function that makes it, as ``file.py:function``.

    Raises:
        SpecError: If it does not make a model that can be trained.
    """
    model, _ = own_model(name)
    sizes = [(one.numel(), one.dim()) for one in model.parameters() if one.requires_grad]
    matrices = [numel for numel, dim in sizes if dim > 1]
    params = sum(numel for numel, _ in sizes)
    if not params:
        raise SpecError(f"the model {name!r} has no parameters that are trained")
    side = math.isqrt(sum(matrices) // len(matrices)) if matrices else 16
    return Shapes(params, len(sizes), min(max(side, 16), 4096), 1 - sum(matrices) / params)


def own_model(name: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor] | None]:
    """Call a function of the user.

    Args:
        name: The function, as ``file.py:function``.

    Returns:
        The model, and if it makes one the function from the model to a loss.

    Raises:
        SpecError: If it makes something else.
    """
    made = own_function("model", name)()
    model, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not (isinstance(model, nn.Module) and (loss is None or callable(loss))):
        raise SpecError(
            f"the model {name!r} gives {type(made).__name__}; it must give a torch.nn.Module, or a pair of one and a"
            " function from it to the loss of a minibatch"
        )
    return model, loss
