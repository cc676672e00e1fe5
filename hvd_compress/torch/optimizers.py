"""The optimizers that apply reduced gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_compress.checkpoint.agreement import OptimizerFacts
from hvd_compress.errors import UnsupportedError

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer]


def as_list(given: Optimizers | None, parameters: Iterable[Tensor]) -> list[Any]:
    """Return one or several optimizers as a list, without the wrappers of Accelerate, Fabric and Lightning.

    Args:
        given: The optimizers; None for none.
        parameters: Parameters of the model that they train.

    Raises:
        UnsupportedError: If one is not a ``torch.optim.Optimizer``, or trains no parameter of the model.
    """
    found = []
    known = {id(parameter) for parameter in parameters}
    for one in () if given is None else given if isinstance(given, Sequence) else (given,):
        inner = unwrapped(one, "a torch.optim.Optimizer, or a list of them")
        if not any(id(parameter) in known for parameter in parameters_of(inner)):
            raise UnsupportedError(
                f"optimizer={type(inner).__name__} trains no parameter of this model: pass the optimizer that was made"
                " with the model's parameters"
            )
        found.append(inner)
    return found


def unwrapped(optimizer: Any, allowed: str = "a torch.optim.Optimizer") -> Any:
    """Return an optimizer without the wrappers of Accelerate, Fabric and Lightning.

    Args:
        optimizer: The optimizer.
        allowed: What may be passed, for the error.

    Raises:
        UnsupportedError: If it is not a ``torch.optim.Optimizer``.
    """
    inner = optimizer
    while not hasattr(inner, "register_step_post_hook") and hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if not hasattr(inner, "register_step_post_hook"):
        raise UnsupportedError(f"optimizer={optimizer!r} is not supported: pass {allowed}")
    return inner


def parameters_of(owner: Any) -> list[Tensor]:
    """Return the parameters of a model or an optimizer.

    Raises:
        UnsupportedError: If it is neither.
    """
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    if not hasattr(owner, "param_groups"):
        raise UnsupportedError(f"{owner!r} has no parameters: pass a model or an optimizer")
    return [parameter for group in owner.param_groups for parameter in group["params"]]


def optimizer_facts(optimizers: Sequence[Any]) -> OptimizerFacts:
    """Return what some optimizers, without wrappers, say of themselves."""

    def groups() -> list[Mapping[str, Any]]:
        return [group for optimizer in optimizers for group in optimizer.param_groups]

    return OptimizerFacts(
        lambda: max((momentum for momentum, damped in map(_momentum, groups()) if not damped), default=0.0),
        lambda: max((momentum for momentum, damped in map(_momentum, groups()) if damped), default=0.0),
        lambda: next((type(one).__name__ for one in optimizers if not isinstance(one, torch.optim.SGD)), ""),
    )


def is_adam(optimizers: Sequence[Any]) -> bool:
    """Return whether some optimizers, without wrappers, may be Adam or a variant: one is not SGD, or none is known."""
    return not optimizers or bool(optimizer_facts(optimizers).not_sgd())


def _momentum(group: Mapping[str, Any]) -> tuple[float, bool]:
    """Return the momentum of a group of parameters, and whether it is a running mean."""
    if "betas" in group:
        return float(group["betas"][0]), True
    momentum = float(group.get("momentum", 0.0))
    return momentum, momentum == group.get("dampening")
