"""One rank of a job with faults, in PyTorch."""

from __future__ import annotations

import gc
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes seconds
from horovod.common.exceptions import HorovodInternalError
from soak.schedules.diary import Arr, Part
from soak.schedules.rank import Incidents, Order, main
from torch import Tensor, nn

from hvd_compress.torch import Compression

LR = 0.05


class TorchTrainer:
    """A trunk with a head, and a second head with an optimizer of its own.

    Args:
        spec: Of the compression.
        merge: How gradients are put into buckets.
    """

    lost: tuple[type[Exception], ...] = (HorovodInternalError,)

    def __init__(self, spec: str, merge: int | str) -> None:
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))
        self.second = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 4))
        self.parts = {"first": self.first}
        self.compression: Any = Compression.parse(spec, merge=merge)
        self.optimizers = {"first": self.make("first")}

    def make(self, part: str) -> Any:
        """A distributed optimizer of one of the parts."""
        module = getattr(self, part)
        named = [(f"{part}.{name}", parameter) for name, parameter in module.named_parameters()]
        local = torch.optim.SGD(module.parameters(), lr=LR)
        return hvd.DistributedOptimizer(local, named_parameters=named, compression=self.compression)

    def parameters(self) -> list[nn.Parameter]:
        return [*self.first.parameters(), *self.second.parameters()]

    def weights(self) -> list[Arr]:
        return [p.detach().numpy().copy() for p in self.parameters()]

    def put(self, weights: list[Arr]) -> None:
        with torch.no_grad():
            for parameter, weight in zip(self.parameters(), weights, strict=True):
                parameter.copy_(torch.from_numpy(weight))

    def leaves(self) -> dict[str, Arr]:
        return {
            f"{name}/{key}/{path}": np.asarray(leaf)
            for name, session in self.compression.state_dict()["sessions"].items()
            for key, leaves in session["buckets"].items()
            for path, leaf in leaves.items()
        }

    def join(self) -> None:
        self.parts["second"] = self.second
        self.optimizers["second"] = self.make("second")

    def renew(self) -> None:
        parts = list(self.optimizers)
        self.optimizers.clear()
        gc.collect()
        self.optimizers = {part: self.make(part) for part in parts}

    def loss(self, incidents: Incidents) -> Tensor:
        """The loss of a batch; something happens in its backward pass."""
        generator = torch.Generator().manual_seed(10 * incidents.step + hvd.rank())
        hidden = self.first(torch.randn(6, 16, generator=generator))
        hidden.register_hook(lambda _: incidents.inside())
        loss: Tensor = hidden.square().mean() + hidden.mean()
        if "second" in self.parts and incidents.second:
            loss = loss + (self.second(hidden) - 1).square().mean()
        return loss

    def step(self, incidents: Incidents) -> dict[str, Part]:
        active = {part: list(getattr(self, part).parameters()) for part in self.optimizers}
        local = {p: torch.zeros_like(p) for mine in active.values() for p in mine}
        hooks = [
            p.register_hook(self._catcher(p, value, local))
            for part, mine in active.items()
            for p, value in zip(mine, self._poison(part, mine, incidents), strict=True)
        ]
        if incidents.batch:
            self.loss(incidents).backward()  # type: ignore[no-untyped-call]
        else:
            incidents.inside()
        for hook in hooks:
            hook.remove()
        for optimizer in self.optimizers.values():
            optimizer.synchronize()
        if incidents.thrown:
            self.compression.discard()
        return {
            part: self._apply(optimizer, active[part], local, incidents.thrown)
            for part, optimizer in self.optimizers.items()
        }

    def _apply(self, optimizer: Any, mine: list[Any], local: dict[Any, Tensor], thrown: bool) -> Part:
        """Apply the gradients of an optimizer, if they are finite and not thrown away."""
        mean = [p.grad.numpy().copy() for p in mine if p.grad is not None]
        part = Part.of([local[p].numpy() for p in mine], mean, thrown, hvd.size())
        if part.counts:
            with optimizer.skip_synchronize():
                optimizer.step()
        optimizer.zero_grad()
        return part

    def _poison(self, part: str, mine: list[Any], incidents: Incidents) -> list[Tensor | None]:
        """What each gradient of an optimizer is multiplied by."""
        value, number = incidents.poison
        factors: list[Tensor | None] = [None] * len(mine)
        if value and (number % 2 or part == "first"):
            chosen = number // 2 % len(mine)
            factor = torch.ones_like(mine[chosen])
            factor.view(-1)[number % factor.numel()] = value
            factors[chosen] = factor
        return factors

    def _catcher(self, p: Tensor, factor: Tensor | None, local: dict[Any, Tensor]) -> Any:
        """Spoils the gradient of a parameter if it is its turn, and remembers it."""

        def catch(gradient: Tensor) -> Tensor:
            if factor is not None:
                gradient = gradient * factor
            local[p] = gradient.clone()
            return gradient

        return catch

    def close(self) -> None:
        hvd.shutdown()


def init() -> None:
    """Join the job."""
    torch.set_num_threads(1)
    hvd.init()


def run(order: Order) -> None:
    """Be a rank."""
    main(order, TorchTrainer, init)
