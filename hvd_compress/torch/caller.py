"""Who calls ``compress``? Horovod does not say, so it is read off the calling frames.

`horovod.torch.optimizer` hands over a bare gradient. Its two calling methods know the parameter and the optimizer; no
public interface does. All knowledge of Horovod's inside is in this file.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import horovod.torch as hvd
from torch import Tensor

from hvd_compress.errors import UnknownParameterError, UnsupportedError

_DEPTH = 4
"""Frames to look at: compress, a comprehension, and Horovod's method."""


class Call(NamedTuple):
    """A call of ``compress`` by Horovod's optimizer.

    Attributes:
        optimizer: The distributed optimizer.
        parameter: Whose gradient is to be compressed.
    """

    optimizer: Any
    parameter: Tensor


def find(grad: Tensor) -> Call:
    """Find the optimizer and the parameter of a gradient that is being compressed.

    Raises:
        UnknownParameterError: If the caller is not Horovod's distributed optimizer.
        UnsupportedError: If it reduces with Adasum.
    """
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame.f_code.co_name == "_allreduce_grad_async":
            return _checked(Call(frame.f_locals["self"], frame.f_locals["p"]))
        if frame.f_code.co_name == "_grouped_allreduce_grad_async":
            members = frame.f_locals["ps"]
            return _checked(Call(frame.f_locals["self"], next(p for p in members if p.grad is grad)))
        if frame.f_back is None:
            break
        frame = frame.f_back
    raise UnknownParameterError(
        f"a tensor of shape {tuple(grad.shape)} was compressed outside of hvd.DistributedOptimizer, so there is no"
        " parameter to keep state for; in direct calls such as hvd.allreduce use Compression.none or Compression.fp16"
    )


def _checked(call: Call) -> Call:
    if hasattr(call.optimizer, "_starting_models") or getattr(call.optimizer, "op", None) == hvd.Adasum:
        raise UnsupportedError(
            "op=hvd.Adasum does not go with this compression: Adasum weighs the gradients of pairs of ranks by their"
            " angle, which a compressed sum cannot tell; use op=hvd.Average, or Compression.fp16 with Adasum"
        )
    return call


def parameters(optimizer: Any) -> list[tuple[str, Tensor]]:
    """The parameters whose gradients the optimizer will compress in each step, in the order of the optimizer."""
    names = optimizer._parameter_names
    members = (p for group in optimizer.param_groups for p in group["params"])
    return [(names[p], p) for p in members if p in optimizer._requires_update]


def momentum(optimizer: Any) -> float:
    """The largest momentum of the optimizer's parameter groups (of Adam and its kin, the first beta)."""
    groups = optimizer.param_groups
    return max((float(group.get("momentum") or group.get("betas", (0,))[0]) for group in groups), default=0.0)


def process_set(optimizer: Any) -> Any:
    """The ranks that the optimizer reduces over."""
    return optimizer.process_set
