"""The published optimizers of the study of AdamW: their papers' equations, on one rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from adam_peers import DeMo, Dion, OneBitAdam, Peer, Settings, dct

BETAS = (0.9, 0.99)
SETTINGS = Settings(0.1, *BETAS, steps=40)


@pytest.fixture(autouse=True)
def world(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(model: nn.Module, peer: Peer, gradients: list[list[Tensor]], lr: float = 0.01) -> list[Tensor]:
    """Apply some gradients, and return the parameters."""
    for grads in gradients:
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad.clone()
        peer.step(lr)
    return [p.detach().clone() for p in model.parameters()]


def drawn(model: nn.Module, steps: int) -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [[torch.randn(p.shape, generator=draw) for p in model.parameters()] for _ in range(steps)]


def test_one_bit_adam_begins_as_adamw() -> None:
    models = [nn.Linear(5, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    gradients = drawn(models[0], round(OneBitAdam.freeze * SETTINGS.steps))
    found = trained(models[0], OneBitAdam(models[0], SETTINGS), gradients)
    adamw = torch.optim.AdamW(models[1].parameters(), 0.01, BETAS, weight_decay=SETTINGS.decay)
    for grads in gradients:
        for p, grad in zip(models[1].parameters(), grads, strict=True):
            p.grad = grad.clone()
        adamw.step()
    for mine, p in zip(found, models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, p.detach())


def test_one_bit_adam_then_has_a_frozen_second_moment() -> None:
    """A sign and a norm are all that there is of one coordinate."""
    model = nn.Linear(1, 1, bias=False)
    gradients, frozen_from = drawn(model, 12), round(OneBitAdam.freeze * SETTINGS.steps)
    p, m, v = model.weight.item(), 0.0, 0.0
    for step, [grad] in enumerate(gradients, start=1):
        g = grad.item()
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = v if step > frozen_from else BETAS[1] * v + (1 - BETAS[1]) * g * g
        bias = [1 - beta**step for beta in BETAS] if step <= frozen_from else [1, 1 - BETAS[1] ** frozen_from]
        p = p * (1 - 0.01 * SETTINGS.decay) - 0.01 * (m / bias[0]) / (math.sqrt(v / bias[1]) + 1e-8)
        m = m / bias[0] if step == frozen_from else m
    [found] = trained(model, OneBitAdam(model, SETTINGS), gradients)
    assert found.item() == pytest.approx(p, rel=1e-4)


@pytest.mark.parametrize("n", [1, 5, 64])
def test_the_dct_is_orthonormal(n: int) -> None:
    torch.testing.assert_close(dct(n) @ dct(n).T, torch.eye(n), atol=1e-5, rtol=0)


def test_demo_sends_the_largest_coefficients_and_keeps_the_rest() -> None:
    """The gradient has 40 DCT coefficients: the 32 largest are sent, and momentum keeps the other 8."""
    model = nn.Linear(64, 64, bias=False)
    before, waves = model.weight.detach().clone(), torch.zeros(64, 64)
    waves.view(-1)[:400:10] = torch.arange(40, 0, -1.0)
    peer = DeMo(model, SETTINGS._replace(decay=0.0))
    [after] = trained(model, peer, [[dct(64).T @ waves @ dct(64)]])
    left, sent = waves.clone(), waves.clone()
    left[waves > 8] = sent[waves <= 8] = 0
    coefficients = dct(64) @ peer.states[0]["d"] @ dct(64).T
    torch.testing.assert_close(coefficients, 0.01 * left, atol=1e-5, rtol=0)
    torch.testing.assert_close(after - before, -0.01 * (dct(64).T @ sent @ dct(64)).sign(), atol=1e-6, rtol=0)
    assert peer.ratio == 4 * 64 * 64 / (32 * 6)


def test_dion_moves_along_orthonormal_directions() -> None:
    """A gradient of rank one is its own direction, and momentum keeps a part of it."""
    model = nn.Linear(6, 8, bias=False)
    before, u, v = model.weight.detach().clone(), torch.arange(1.0, 9), torch.arange(1.0, 7)
    peer = Dion(model, SETTINGS._replace(decay=0.0))
    peer.rank = 1
    [after] = trained(model, peer, [[torch.outer(u, v)]])
    expected = -0.01 * math.sqrt(8 / 6) * torch.outer(u / u.norm(), v / v.norm())
    torch.testing.assert_close(after - before, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(peer.states[0]["m"], Dion.mu * torch.outer(u, v), atol=1e-4, rtol=0)
