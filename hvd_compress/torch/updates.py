"""Refuse updates that were changed before the optimizer applies them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_compress.errors import UnsupportedError
from hvd_compress.torch.discards import weakly

_LOOKS = 3
"""Number of steps that are looked at, as the host waits for the device then."""

_TOLERANCE = 0.01
"""Relative change of a norm that may be one of precision."""


class UpdateWatch:
    """Compare the norms of updates when they have been reduced and when an optimizer begins its step.

    Args:
        optimizers: The optimizers, as far as they are known.

    Attributes:
        looks: Number of optimizer steps that are still to be looked at.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._norms: dict[int, Tensor] = {}
        self.looks = _LOOKS * len(optimizers)
        for optimizer in optimizers:
            weakref.finalize(self, optimizer.register_step_pre_hook(weakly(self._check)).remove)

    def reduced(self, updates: Mapping[int, Tensor], scale: float) -> None:
        """Note the updates of a step, by the keys of their parameters, and the loss scale that they are in."""
        norms = torch._foreach_norm(list(updates.values())) if self.looks else []
        self._norms = {key: norm.float() / scale for key, norm in zip(updates, norms, strict=False)}

    def _check(self, optimizer: Any, *_: Any) -> None:
        if not self.looks:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        known = [(_local(p.grad), self._norms.pop(id(p))) for p in parameters if id(p) in self._norms]
        if not known:
            return
        self.looks -= 1
        before = torch.stack([norm.cpu() for _, norm in known])  # a model may lie on several devices
        after = torch.stack([norm.float().cpu() for norm in torch._foreach_norm([grad for grad, _ in known])])
        if ((after - before).abs() > _TOLERANCE * before).any():
            raise UnsupportedError(
                "updates were changed between their reduction and optimizer.step(), which is not supported with"
                " preconditioned=on: instead of torch.nn.utils.clip_grad_norm_, clip each rank's gradients by the"
                " option clip_norm=...; with a GradScaler, call compression.follow(scaler) before training"
            )


def _local(grad: Tensor) -> Tensor:
    """Return a gradient, or this rank's shard of it."""
    local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    return local
