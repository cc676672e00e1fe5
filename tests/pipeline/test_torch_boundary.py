"""The boundary in one process, in PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hvd_compress.errors import BoundaryError
from hvd_compress.pipeline.torch import CompressedBoundary
from hvd_compress.pipeline.wire import HEADER

SHAPE = (6, 4, 5)


def tensor(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def through(boundary: CompressedBoundary, x: Tensor, gradient: Tensor, **facts: Any) -> tuple[Tensor, Tensor]:
    """What comes out, and the gradient that comes back."""
    x = x.clone().requires_grad_()
    y = boundary(x, **facts)
    y.backward(gradient)
    assert x.grad is not None
    return y.detach(), x.grad


def test_without_compression_it_is_the_identity() -> None:
    """By its bits, and by numerical differentiation."""
    y, back = through(CompressedBoundary(), tensor(0), tensor(1))
    assert torch.equal(y, tensor(0)) and torch.equal(back, tensor(1))
    x = tensor(0, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(CompressedBoundary(), (x,))
    assert torch.autograd.gradcheck(nn.Sequential(nn.Tanh(), CompressedBoundary(), nn.Sigmoid()), (x,))


def test_gradcheck_would_see_another_gradient() -> None:
    x = tensor(0, torch.float64).requires_grad_()
    assert not torch.autograd.gradcheck(CompressedBoundary(backward="efsignsgd"), (x,), raise_exception=False)


@pytest.mark.parametrize("back", ["none", "topk:ratio=0.3", "minmax:bits=4", "qsgd:bits=8", "powersgd:rank=2", "fp16"])
@pytest.mark.parametrize("forth", ["none", "topk:ratio=0.1", "minmax:bits=2", "qsgd:bits=4", "fp16"])
def test_gradients_are_compressed_and_pass_straight_through(forth: str, back: str) -> None:
    """Of the activation's operator the gradient knows nothing: what comes back is D(C_b(dL/dy))."""
    y, gradient = through(CompressedBoundary(forth, back), tensor(0), tensor(1))
    assert torch.equal(y, CompressedBoundary(forward=forth)(tensor(0)))
    # the gradient's own operator, of the same seed: as activations do not matter, those here are others
    assert torch.equal(gradient, through(CompressedBoundary("none", back), tensor(9), tensor(1))[1])
    if back == "topk:ratio=0.3":
        kept = gradient.reshape(6, -1).count_nonzero(dim=1)
        assert kept.tolist() == [6] * 6 and torch.equal(gradient[gradient != 0], tensor(1)[gradient != 0])


@pytest.mark.parametrize("relu", [False, True])
def test_a_shared_mask_is_that_of_the_activation_that_arrived(relu: bool) -> None:
    x = tensor(0).relu() if relu else tensor(0)
    boundary = CompressedBoundary("topk:ratio=0.7", "shared")
    y, gradient = through(boundary, x, tensor(1))
    assert torch.equal(gradient, torch.where(y != 0, tensor(1), 0.0))
    traffic, kept = boundary.stats(), int(y.count_nonzero())
    assert traffic.forward.bytes_sent == HEADER + 6 * 14 * 6
    assert traffic.backward.bytes_sent == HEADER + 4 * kept
    assert kept < 6 * 14 if relu else kept == 6 * 14


def test_independent_masks_are_independent() -> None:
    y, gradient = through(CompressedBoundary("topk:ratio=0.3", "topk:ratio=0.3"), tensor(0), tensor(1))
    assert not torch.equal(y != 0, gradient != 0)


def test_the_memory_of_a_boundary_goes_on() -> None:
    """Over steps, what arrived and what is left add up, in both directions."""
    boundary = CompressedBoundary("topk:ratio=0.3", "topk:ratio=0.3", memory="ef")
    sums = torch.zeros(2, *SHAPE)
    for _ in range(40):
        y, gradient = through(boundary, tensor(0), tensor(1))
        sums += torch.stack([y, gradient])
    torch.testing.assert_close(sums / 40, torch.stack([tensor(0), tensor(1)]), atol=0.25, rtol=0)
    one = torch.stack(through(CompressedBoundary("topk:ratio=0.3", "topk:ratio=0.3"), tensor(0), tensor(1)))
    assert (one - torch.stack([tensor(0), tensor(1)])).abs().max() > 0.5


def test_aqsgd_gets_nearer_to_a_sample_that_does_not_change() -> None:
    boundary, ids = CompressedBoundary("minmax:bits=2", memory="aqsgd:samples=6"), np.arange(6)
    assert torch.equal(boundary(tensor(0), ids), tensor(0))  # the first visit
    errors = [float((boundary(tensor(1), ids) - tensor(1)).norm()) for _ in range(5)]
    assert all(b < a / 2 for a, b in pairwise(errors))


def test_ids_may_be_tensors() -> None:
    boundary = CompressedBoundary("minmax:bits=2", memory="aqsgd:samples=6")
    assert torch.equal(boundary(tensor(0), torch.arange(6)), tensor(0))
    assert boundary.stats().forward.bytes_sent == HEADER + 8 * 6 + 4 * 120


@pytest.mark.parametrize("inference", [True, False])
def test_inference(inference: bool) -> None:
    boundary = CompressedBoundary("topk:ratio=0.1", inference=inference).eval()
    y = boundary(tensor(0))
    assert torch.equal(y, CompressedBoundary("topk:ratio=0.1")(tensor(0)) if inference else tensor(0))


def test_what_is_given_stays_as_it_is() -> None:
    for spec in ("none", "topk", "qsgd", "minmax", "fp16", "powersgd"):
        x, gradient = tensor(0), tensor(1)
        through(CompressedBoundary(spec, spec, memory="ef"), x, gradient)
        assert torch.equal(x, tensor(0)) and torch.equal(gradient, tensor(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    y, gradient = through(CompressedBoundary("topk:ratio=0.3", "minmax:bits=8"), tensor(0, dtype), tensor(1, dtype))
    assert y.dtype == gradient.dtype == dtype
    assert torch.equal(y[y != 0], tensor(0, dtype)[y != 0])


def test_tensors_of_other_layouts() -> None:
    x = tensor(0).transpose(0, 2)
    assert not x.is_contiguous()
    assert torch.equal(CompressedBoundary()(x), x)


@pytest.mark.parametrize(
    "x", [torch.arange(3), torch.tensor(1.0), torch.empty(0, 3), torch.zeros(2, 2, dtype=torch.complex64)]
)
def test_what_a_boundary_cannot_carry(x: Tensor) -> None:
    with pytest.raises(BoundaryError, match=r"dense tensors of float32, .* whose first axis is that of samples"):
        CompressedBoundary("topk")(x)


def test_the_last_minibatch_of_an_epoch() -> None:
    boundary = CompressedBoundary("topk", memory="ef")
    boundary(tensor(0))
    with pytest.raises(BoundaryError, match=r"began with float32 \(6, 4, 5\), and now there is float32 \(5, 4, 5\)"):
        boundary(tensor(0)[:5])


def checkpointed(reentrant: bool, boundary: nn.Module) -> Tensor:
    """The gradient of the weights of a model whose middle is computed again in the backward pass."""
    torch.manual_seed(0)
    first, middle = nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), boundary, nn.Linear(5, 5), nn.Tanh())
    y: Tensor = checkpoint(middle, first(tensor(0)), use_reentrant=reentrant)
    torch.autograd.backward(y.square().sum())
    return torch.cat([p.grad.flatten() for p in [*first.parameters(), *middle.parameters()] if p.grad is not None])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "settings", [("qsgd:bits=4", "none"), ("topk", "ef"), ("minmax", "ef21"), ("powersgd", "none")]
)
def test_activations_that_would_be_others_the_second_time_are_refused(
    settings: tuple[str, str], reentrant: bool
) -> None:
    boundary = CompressedBoundary(settings[0], memory=(settings[1], "none"))
    with pytest.raises(BoundaryError, match=r"boundary0.forward \(.* leave the boundary out of what is computed again"):
        checkpointed(reentrant, boundary)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "settings", [("none", "qsgd"), ("topk:ratio=0.3", "shared"), ("minmax:bits=4", "topk"), ("fp16", "bf16")]
)
def test_activations_that_are_the_same_may_be_computed_again(settings: tuple[str, str], reentrant: bool) -> None:
    once, again = CompressedBoundary(*settings), CompressedBoundary(*settings)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), once, nn.Linear(5, 5), nn.Tanh())
    model(tensor(0)).square().sum().backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert torch.equal(checkpointed(reentrant, again), expected)
    assert [traffic[:4] for traffic in again.stats()] == [traffic[:4] for traffic in once.stats()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_before_and_behind_a_boundary_may_be_computed_again(reentrant: bool) -> None:
    found = []
    uses: list[Callable[..., Any]] = [lambda part, x: part(x), partial(checkpoint, use_reentrant=reentrant)]
    for use in uses:
        torch.manual_seed(0)
        before, behind = nn.Sequential(nn.Linear(5, 5), nn.Tanh()), nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        boundary, x = CompressedBoundary("qsgd", "qsgd", memory="ef"), tensor(0).requires_grad_()
        for _ in range(2):
            torch.autograd.backward(use(behind, boundary(use(before, x))).square().sum())
        found.append([x.grad, *(p.grad for p in (*before.parameters(), *behind.parameters()))])
    for a, b in zip(*found, strict=True):
        assert a is not None and torch.equal(a, b)


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "topk:ratio=0.3", "qsgd"])
def test_autocast_changes_nothing(spec: str) -> None:
    """Neither forward nor back: operators compute in the precision of what they are given."""
    plain, cast = CompressedBoundary(spec, spec, memory="ef"), CompressedBoundary(spec, spec, memory="ef")
    for step in range(2):
        expected = through(plain, tensor(step), tensor(9))
        with torch.autocast("cpu", torch.bfloat16):
            found = through(cast, tensor(step), tensor(9))
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


def test_copies_are_apart() -> None:
    boundary = CompressedBoundary("topk:ratio=0.3", memory="ef")
    boundary(tensor(0))
    other = copy.deepcopy(boundary)
    assert torch.equal(other(tensor(1)), boundary(tensor(1)))
    boundary(tensor(2))
    assert other.stats().forward.messages == 2 and boundary.stats().forward.messages == 3


def test_statistics() -> None:
    boundary = CompressedBoundary("topk:ratio=0.3", "minmax:bits=4")
    for step in range(3):
        through(boundary, tensor(step), tensor(1))
    forward, backward = boundary.stats()
    assert forward.messages == backward.messages == 3
    assert forward.plain_bytes == backward.plain_bytes == 3 * 480
    assert forward.bytes_sent == 3 * (HEADER + 6 * 6 * 6)
    assert backward.bytes_sent == 3 * (HEADER + 8 + 60)
    assert forward.ratio == forward.plain_bytes / forward.bytes_sent
    assert forward.encode_seconds > 0
    boundary.eval()(tensor(0))
    assert boundary.stats().forward[:4] == forward[:4]  # of training alone
