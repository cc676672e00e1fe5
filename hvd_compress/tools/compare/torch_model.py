"""Training in PyTorch, whatever reduces the gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy.typing as npt
import torch
from torch.utils import _pytree as pytree

from hvd_compress.lab import Setting, Training
from hvd_compress.tools.ranks.process import settle


class TorchModel:
    """A model in training: the part of a `Trainer` of PyTorch that does not communicate."""

    compression: Any
    device: str
    local: Any = None
    """Local steps, which average models in place of gradients."""

    def build(self, make: Callable[[Setting], Training], setting: Setting) -> Training:
        torch.manual_seed(setting.seed)
        self._training = make(setting)
        self._training.model.to(self.device)
        self._plain = self._training.optimizer
        self._before = copy.deepcopy([self._training.model.state_dict(), self._plain.state_dict()])
        self._rates = [group["lr"] for group in self._plain.param_groups]
        self._seed = 1000 * (setting.seed + 1) + setting.rank
        return self._training

    def step_alone(self, batch: Any) -> None:
        self.step_local(batch)
        settle(self.device)

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return the loss of a minibatch, which is moved to the device of this rank."""
        on_device = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), batch)
        return self._training.loss(model, on_device)

    def restart(self) -> None:
        """Undo the steps made alone."""
        model = self._training.model
        model.load_state_dict(self._before[0])
        self._plain.load_state_dict(self._before[1])
        torch.manual_seed(self._seed)

    def _clip(self) -> None:
        if self._training.clip is not None:
            torch.nn.utils.clip_grad_norm_(self._training.model.parameters(), self._training.clip)

    def evaluate(self) -> float:
        model = self._training.model
        model.eval()
        with torch.no_grad(), self.local.averaged() if self.local else nullcontext():
            found = float(self._training.evaluate(model))
        model.train()
        return found

    def finish(self) -> None:
        if self.local:
            self.local.finish()

    def step_local(self, batch: Any) -> float:
        """Make a step whose gradients stay on this rank."""
        self._plain.zero_grad()
        loss = self.loss(self._training.model, batch)
        loss.backward()
        self._clip()
        self._plain.step()
        return float(loss.item())

    def learning_rate(self) -> float:
        return float(self._plain.param_groups[0]["lr"])

    def scale_rate(self, factor: float) -> None:
        for group, rate in zip(self._plain.param_groups, self._rates, strict=True):
            group["lr"] = factor * rate

    def weights(self) -> Iterator[npt.NDArray[Any]]:
        return (p.detach().cpu().numpy() for p in self._training.model.parameters() if p.requires_grad)
