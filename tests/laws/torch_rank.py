"""One rank of a program in PyTorch, whatever reduces its gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from laws.program import Arr, Fate, Model, Program, Step, Use
from torch import Tensor, nn

from hvd_compress.engine.spec import as_router
from hvd_compress.torch.compressor import ReducingCompressor

PlaceholderTerms = Sequence[tuple[int, Tensor]]


class Part(nn.Module):
    """A parameter whose gradient is known, as the loss is linear."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, gradient: Tensor) -> Tensor:
        """Return the loss."""
        return (self.weight * gradient).sum()


class Net(nn.Module):
    """A model of some parts.

    Args:
        model: Its description.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.parts = nn.ModuleList(map(Part, model.shapes))
        self.tied = self.parts[0] if model.tied else None

    @property
    def own(self) -> list[nn.Parameter]:
        """The parameters."""
        return [part.weight for part in self.parts]  # type: ignore[misc]

    def forward(self, terms: PlaceholderTerms) -> Tensor:
        """Return the loss, given the parameters in use with their gradients."""
        losses = [self.parts[number](gradient) for number, gradient in terms]
        if self.tied is not None:
            losses += [self.tied(gradient) for number, gradient in terms if number == 0]
        return torch.stack(losses).sum()


class TorchRank(ABC):
    """A rank that runs a program.

    Args:
        program: The program.
        rank: The number of the rank.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank, self.scale = program, rank, 1.0
        self.nets = [Net(model) for model in program.models]
        self.compression: Any = None
        self.resumed()

    @abstractmethod
    def compressor(self) -> ReducingCompressor:
        """Return a new compressor."""

    @abstractmethod
    def renewed(self) -> None:
        """Make optimizers or wrappers, in place of those that there are."""

    def resumed(self) -> None:
        """Make everything anew, from the saved state."""
        saved = self.compression and self.compression.state_dict()
        self.compression = self.compressor()
        self.compression.follow(lambda: self.scale)
        if saved:
            self.compression.load_state_dict(saved)
        self.renewed()

    def run(self) -> list[dict[tuple[int, int], Arr]]:
        """Return what was delivered in each step."""
        return [self._step(number, step) for number, step in enumerate(self.program.ended)]

    def _step(self, number: int, step: Step) -> dict[tuple[int, int], Arr]:
        if step.before:
            getattr(self, step.before)()
        self.scale = 2.0**step.scale
        for use in step.uses:
            for p, parameter in enumerate(self.nets[use.model].own):
                parameter.requires_grad_(p not in use.frozen)
        for part in range(step.passes):
            with self.during(step, part):
                losses = [loss for loss in self._losses(number, step, part) if loss.requires_grad]
                if losses:
                    (torch.stack(losses).sum() * self.scale).backward()  # type: ignore[no-untyped-call]
        self.finish(step)
        delivered = {
            (use.model, p): self.read(parameter)
            for use in step.uses
            for p, parameter in enumerate(self.nets[use.model].own)
        }
        for net in self.nets:
            self.clear(net)
        return delivered

    def _losses(self, number: int, step: Step, part: int) -> Iterator[Tensor]:
        for use in step.uses:
            used = self.program.used(number, use, part, self.rank)
            gradients = [self.program.gradient(number, use, part, self.rank, p) for p in used]
            if used:
                terms = list(zip(used, map(torch.from_numpy, gradients), strict=True))
                yield self.forward(use.model, terms)

    def forward(self, model: int, terms: PlaceholderTerms) -> Tensor:
        """Return the loss of a model."""
        loss: Tensor = self.nets[model](terms)
        return loss

    def during(self, step: Step, part: int) -> AbstractContextManager[object]:
        """Return what a pass runs in."""
        return nullcontext()

    @abstractmethod
    def finish(self, step: Step) -> None:
        """Reduce the gradients that were not reduced in backward, and apply them or not."""

    def read(self, parameter: Tensor) -> Arr:
        """Return the sum over the ranks that a parameter got."""
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return (grad.double() * (self.program.ranks / self.scale)).numpy()

    def clear(self, net: Net) -> None:
        """Drop the gradients of a model."""
        net.zero_grad()


class OptimizerRank(TorchRank):
    """A rank whose optimizers reduce gradients."""

    optimizers: Mapping[tuple[int, tuple[int, ...]], Any]

    @abstractmethod
    def optimizer(self, model: int, parameters: dict[str, nn.Parameter]) -> Any:
        """Return an optimizer of some parameters of a model."""

    def renewed(self) -> None:
        for parameter in (p for net in self.nets for p in net.parameters()):
            parameter.requires_grad_(True)
        self.optimizers = {
            (number, own): self.optimizer(number, {f"m{number}p{p}": self.nets[number].own[p] for p in own})
            for number, model in enumerate(self.program.models)
            for own in model.optimizers
        }

    def owner(self, optimizer: Any) -> Any:
        """Return what `discard` is told."""
        return optimizer

    def taken(self, step: Step) -> list[tuple[Use, Any, Fate]]:
        """Return the optimizers that take part, in the order of their steps."""
        found = [
            (use, self.optimizers[use.model, own], fate)
            for use in step.uses
            for own, fate in self.program.optimizers_of(use)
        ]
        return found[::-1] if step.turned and self.rank % 2 else found

    def finish(self, step: Step) -> None:
        for _, optimizer, fate in self.taken(step):
            if fate == "applied":
                optimizer.step()
            elif fate == "given up":
                optimizer.load_state_dict(optimizer.state_dict())
            else:
                optimizer.synchronize()
            if fate == "discarded":
                self.compression.discard(self.owner(optimizer))


def method_of(program: Program) -> Any:
    """Return the method of a program."""
    return as_router(program.method)
