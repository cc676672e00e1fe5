"""Hooks of an optimizer of PyTorch, in which its model is averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from hvd_compress.errors import UnsupportedError
from hvd_compress.local.base import Stepper
from hvd_compress.torch.compressor import ReducingCompressor, parse, to_tensors
from hvd_compress.torch.optimizers import parameters_of, unwrapped
from hvd_compress.transport.protocol import TrainingTransport


class OptimizerStepper(Stepper):
    """Base class of `LocalSteps` and `Gossip` in PyTorch: runs in hooks of an optimizer.

    Args:
        optimizer: The optimizer of this rank's model, whose gradients nobody reduces over these ranks.
        settings: The settings.
        compression: Compresses what is exchanged.
        transport: Transport of the ranks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        settings: Any,
        compression: ReducingCompressor,
        transport: TrainingTransport,
    ) -> None:
        inner = unwrapped(optimizer)
        self._parameters = _trained(inner)
        label = compression._registry.label(self._kind, set())
        with torch.no_grad():
            super().__init__(settings, compression, transport, label, transport.members)
        register = inner.register_step_pre_hook if self._before else inner.register_step_post_hook
        self._hook = register(self._stepped)

    def _arrays(self) -> list[Tensor]:
        detached: list[Any] = [parameter.detach() for parameter in self._parameters]
        return [one.to_local() if hasattr(one, "to_local") else one for one in detached]

    def _write(self, numbers: Sequence[int], arrays: Sequence[Tensor]) -> None:
        mine = self._arrays()
        with torch.no_grad():
            for number, array in zip(numbers, arrays, strict=True):
                mine[number].copy_(array)

    def _array(self, values: Any, like: Any = None) -> Tensor:
        array = torch.from_numpy(np.array(values))
        return array if like is None else array.to(like.device, like.dtype)

    def _numpy(self, array: Tensor) -> Any:
        known = array.float() if array.dtype is torch.bfloat16 else array  # which numpy has not; float32 holds it
        return known.to("cpu", copy=True).numpy()

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        """Run the hook of a step of the optimizer."""
        if len(now := _trained(optimizer)) != len(self._parameters):
            raise UnsupportedError(
                f"the optimizer has {len(now)} parameters that require a gradient, but it had {len(self._parameters)}"
                f" when {type(self).__name__} was made: call its remove(), and make a new one, on all ranks"
            )
        with torch.no_grad():
            self._step()

    def remove(self) -> None:
        """Do nothing in further steps of the optimizer; an exchange on its way is waited for."""
        self._settle()
        self._hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank: that of its compression, step counts, and the global model of local steps.

        An exchange on its way is waited for, so all ranks call it after the same step. Parameters and the optimizer are
        saved beside it, those of each rank: they differ.

        Returns:
            Nested dicts of tensors, numbers and strings, which ``torch.load(..., weights_only=True)`` can read.
        """
        return to_tensors(self._saved())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state.

        Args:
            state: State from `state_dict` on the same rank.

        Raises:
            StateError: If it is not a saved state, or belongs to other parameters or settings, another method, rank or
                number of ranks. Nothing is changed.
        """
        self._load([parse(state)])


def _trained(optimizer: Any) -> list[Tensor]:
    """Return the parameters of an optimizer that require a gradient: others do not change."""
    return [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]
