"""Published optimizers that send little, for comparison: each is true to its paper, on full-precision collectives.

The numbers that ranks would send are computed and then summed in full precision; their bytes are counted.
A peer replaces DistributedDataParallel and the optimizer: it takes the local gradients.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn


def mean_of(x: Tensor) -> Tensor:
    """Return the mean over the ranks."""
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


class Settings(NamedTuple):
    """Weight decay, Adam's betas, and the number of steps of the training."""

    decay: float
    beta1: float
    beta2: float
    steps: int


class Peer(ABC):
    """An optimizer that exchanges what it needs itself, instead of gradients.

    Attributes:
        sent: Bytes that this rank has passed to collectives.
        outer: Identities of the parameters of embeddings and of the head.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.parameters = list(model.parameters())
        self.settings, self.steps, self.sent = settings, 0, 0.0
        self.states: list[dict[str, Tensor]] = [{} for _ in self.parameters]
        outer = (one for name, one in model.named_modules() if isinstance(one, nn.Embedding) or name == "head")
        self.outer = {id(p) for one in outer for p in one.parameters()}

    @property
    def ratio(self) -> float:
        """Bytes of uncompressed gradients, divided by those that were sent."""
        return 4 * sum(p.numel() for p in self.parameters) * self.steps / self.sent

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Apply this rank's gradients with a learning rate."""
        self.steps += 1
        for p, state in zip(self.parameters, self.states, strict=True):
            assert p.grad is not None
            p.mul_(1 - lr * self.settings.decay)
            self.update(p, p.grad, state, lr)

    @abstractmethod
    def update(self, p: Tensor, g: Tensor, state: dict[str, Tensor], lr: float) -> None:
        """Update a parameter by this rank's gradient."""

    def dense(self, g: Tensor) -> Tensor:
        """Return the mean of gradients that are not compressed."""
        self.sent += 4 * g.numel()
        return mean_of(g)

    def adamw(self, p: Tensor, g: Tensor, state: dict[str, Tensor], lr: float) -> None:
        """A step of AdamW with an uncompressed gradient."""
        beta1, beta2 = self.settings.beta1, self.settings.beta2
        m = state.setdefault("m", torch.zeros_like(p)).lerp_(g, 1 - beta1)
        v = state.setdefault("v", torch.zeros_like(p)).lerp_(g.square(), 1 - beta2)
        p.sub_(lr * (m / (1 - beta1**self.steps)) / ((v / (1 - beta2**self.steps)).sqrt() + 1e-8))


class OneBitAdam(Peer):
    """Tang et al., 1-bit Adam, 2021 (2102.02888): Adam first, then v is frozen, and m goes by 1 bit, both ways.

    The sign is scaled by norm / sqrt(d) per tensor, with error feedback on workers and on the server.
    DeepSpeed's onebit/adam.py corrects no bias; here the warm-up does, so that it is AdamW.
    """

    freeze = 0.15  # of the steps; the paper: 15 to 20 %

    def update(self, p: Tensor, g: Tensor, state: dict[str, Tensor], lr: float) -> None:  # noqa: D102
        frozen_from, beta1 = max(1, round(self.freeze * self.settings.steps)), self.settings.beta1
        if self.steps <= frozen_from:
            self.adamw(p, self.dense(g), state, lr)
            if self.steps == frozen_from:
                state["root"] = (state["v"] / (1 - self.settings.beta2**self.steps)).sqrt() + 1e-8
                state["m"] /= 1 - beta1**self.steps
            return
        mine = beta1 * state["m"] + (1 - beta1) * g
        total = mean_of(self.signs(mine, state, "worker"))
        state["m"] = self.signs(total, state, "server")  # equal on all ranks, as if one had served all
        self.sent += p.numel() / 8 + 4  # as the coordinates that a rank serves, and sends, are not sent to itself
        p.sub_(lr * state["m"] / state["root"])

    @staticmethod
    def signs(x: Tensor, state: dict[str, Tensor], whose: str) -> Tensor:
        """Compress to a bit per coordinate, and keep the error."""
        x = x + state.setdefault(whose, torch.zeros_like(x))
        sent: Tensor = torch.where(x >= 0, 1.0, -1.0) * (x.norm() / math.sqrt(x.numel()))
        state[whose] = x - sent
        return sent


class DeMo(Peer):
    """Peng, Quesnelle, Kingma, Decoupled Momentum Optimization, 2024 (2411.19870): top-k of the DCT of momentum.

    d = .999 d + lr g; the 32 largest of each chunk of 64 x 64 of its DCT are sent and taken from d; p moves by lr times
    the sign of the mean of what is sent, of each coefficient over those that send it.
    """

    keep, chunk, keeping = 32, 64, 0.999

    def update(self, p: Tensor, g: Tensor, state: dict[str, Tensor], lr: float) -> None:  # noqa: D102
        d = state.setdefault("d", torch.zeros_like(p)).mul_(self.keeping).add_(g, alpha=lr)
        transform = _Dct(d, self.chunk)
        coefficients = transform.apply(d)
        kept = min(self.keep, coefficients.shape[1])
        chosen = torch.zeros_like(coefficients).scatter_(1, coefficients.abs().topk(kept, dim=1).indices, 1)
        self.sent += len(chosen) * kept * (4 + 2)
        d.sub_(transform.invert(chosen * coefficients))
        mean = mean_of(chosen * coefficients) / mean_of(chosen).clamp(min=1e-9)
        p.sub_(lr * transform.invert(mean).sign())


class _Dct:
    """DCT of the chunks of a matrix, or of a vector, which have the largest sides that divide those of the matrix."""

    def __init__(self, x: Tensor, chunk: int) -> None:
        self.shape = x.shape
        rows, columns = x.shape if x.ndim == 2 else (1, x.numel())
        a, b = (next(size for size in range(min(chunk, n), 0, -1) if n % size == 0) for n in (rows, columns))
        self.left, self.right, self.sides = dct(a).to(x), dct(b).to(x), (rows // a, a, columns // b, b)

    def apply(self, x: Tensor) -> Tensor:
        """Return the coefficients, a row for each chunk."""
        up, a, across, b = self.sides
        found: Tensor = self.left @ x.reshape(self.sides).transpose(1, 2) @ self.right.T
        return found.reshape(up * across, a * b)

    def invert(self, coefficients: Tensor) -> Tensor:
        up, a, across, b = self.sides
        found: Tensor = self.left.T @ coefficients.view(up, across, a, b) @ self.right
        return found.transpose(1, 2).reshape(self.shape)


@cache
def dct(n: int) -> Tensor:
    """Return the orthonormal matrix of the DCT (type 2)."""
    k, i = torch.arange(n)[:, None], torch.arange(n)[None]
    matrix = torch.cos(math.pi / n * (i + 0.5) * k) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix


class Dion(Peer):
    """Ahn et al., Dion: Distributed Orthonormalized Updates, 2025 (2504.05295), algorithm 1, with local momentum.

    M += G; P = qr(mean M Q); R = mean M'P; M -= (1 - mu) P R'; Q = colnorm(R); X -= lr sqrt(m / n) P Q'.
    Embeddings, the head and vectors go by AdamW, uncompressed.
    """

    rank, mu = 4, 0.95

    def update(self, p: Tensor, g: Tensor, state: dict[str, Tensor], lr: float) -> None:  # noqa: D102
        if p.ndim != 2 or id(p) in self.outer:
            self.adamw(p, self.dense(g), state, lr)
            return
        rows, columns = p.shape
        momentum = state.setdefault("m", torch.zeros_like(p)).add_(g)
        if "q" not in state:
            state["q"] = torch.randn(columns, self.rank, generator=torch.Generator().manual_seed(columns)).to(p)
        left = torch.linalg.qr(mean_of(momentum @ state["q"])).Q
        right = mean_of(momentum.T @ left)
        momentum.sub_((1 - self.mu) * left @ (momentum.T @ left).T)  # of its own, as each rank has its momentum
        state["q"] = right / (right.norm(dim=0) + 1e-8)
        self.sent += 4 * self.rank * (rows + columns)
        p.sub_(lr * math.sqrt(rows / columns) * left @ state["q"].T)


PEERS: dict[str, Callable[[nn.Module, Settings], Peer]] = {"onebit-adam": OneBitAdam, "demo": DeMo, "dion": Dion}
