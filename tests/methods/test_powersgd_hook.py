"""PowerSGD gives what PyTorch's own hook for `DistributedDataParallel` gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from worlds import Arr, bucket_of, ops_of

from hvd_compress.core.collectives import World
from hvd_compress.core.method import Method
from hvd_compress.methods.powersgd import PowerSGD
from hvd_compress.methods.wrappers.error_feedback import ErrorFeedback
from hvd_compress.ops.arrays import Shape
from hvd_compress.transport.lockstep import lockstep

SHAPES = ((40, 30), (24, 50), (64, 16))
OPS = ops_of("torch")
BEFORE = 2
"""Steps that the hook makes without compression: PyTorch arranges its buckets in the first."""


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    file = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Weights(nn.Module):
    """Weights whose gradients are what it is called with."""

    def __init__(self, shapes: tuple[Shape, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return sum(((w * g).sum() for w, g in zip(self.weights, gradients, strict=True)), torch.zeros(()))


class Hooked:
    """PyTorch's hook on gradients of these shapes.

    Args:
        rank: Of the approximation.
        feedback: With error feedback.
        qs: The first right factors.
    """

    def __init__(self, rank: int, feedback: bool, qs: list[torch.Tensor]) -> None:
        self._state = PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=BEFORE,
            min_compression_rate=0,
            use_error_feedback=feedback,
        )
        self._order: list[int] = []
        self._model = DistributedDataParallel(Weights(SHAPES))
        self._model.register_comm_hook(self._state, lambda state, bucket: self._hook(state, bucket))
        for _ in range(BEFORE):
            self.step([np.zeros(shape, np.float32) for shape in SHAPES])
        self._state.p_memory_dict[0] = torch.cat([torch.empty(SHAPES[i][0] * rank) for i in self._order])
        self._state.q_memory_dict[0] = torch.cat([qs[i].flatten() for i in self._order])

    def _hook(self, state: PowerSGDState, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        assert bucket.is_last()  # all in one bucket, in an order of PyTorch's own
        weights = list(self._model.module.weights)
        self._order = [next(i for i, w in enumerate(weights) if w is p) for p in bucket.parameters()]
        return powerSGD_hook(state, bucket)

    def step(self, gradients: list[Arr]) -> list[Arr]:
        """What the hook makes of gradients."""
        self._model.zero_grad()
        self._model([torch.from_numpy(g) for g in gradients]).backward()
        made: list[Arr] = [w.grad.numpy().copy() for w in self._model.module.weights]
        return made


class Ours:
    """Our method on gradients of these shapes."""

    def __init__(self, method: Method, ranks: int) -> None:
        self._method, self._bucket = method, bucket_of(*SHAPES)
        self._states = [method.init(OPS, self._bucket, World(0, ranks)) for _ in range(ranks)]

    @property
    def qs(self) -> list[torch.Tensor]:
        """The right factors that the next step starts from."""
        state = self._states[0]
        flat = state.inner.q if isinstance(self._method, ErrorFeedback) else state.q
        return list(flat.split([flat.numel() * shape[1] // sum(s[1] for s in SHAPES) for shape in SHAPES]))

    def step(self, gradients: list[list[Arr]]) -> list[Arr]:
        """The mean over the ranks of what their exchange ends with."""
        xs = [np.concatenate([g.ravel() for g in mine]) for mine in gradients]
        results = lockstep(OPS, self._method, self._bucket, xs, self._states)
        self._states = [result.state for result in results]
        mean = np.asarray(results[0].total) / len(xs)
        pieces = np.split(mean, np.cumsum(self._bucket.sizes)[:-1])
        return [piece.reshape(shape) for piece, shape in zip(pieces, SHAPES, strict=True)]


def spectrum(rng: np.random.Generator) -> list[Arr]:
    """Random matrices whose singular values fall by a third each time, so that a small rank says a lot."""

    def draw(rows: int, columns: int) -> Arr:
        u, _, vt = np.linalg.svd(rng.standard_normal((rows, columns)), full_matrices=False)
        matrix: Arr = (u * 0.67 ** np.arange(min(rows, columns))) @ vt
        return matrix.astype(np.float32)

    return [draw(*shape) for shape in SHAPES]


@pytest.mark.parametrize("rank", [1, 2, 4])  # up to 2 the hook orthogonalises by Gram-Schmidt, above by Householder
def test_equals_the_hook_with_feedback_and_warm_start(rank: int) -> None:
    ours = Ours(ErrorFeedback(PowerSGD(rank=rank, min_gain=0)), ranks=1)
    hooked, rng = Hooked(rank, True, ours.qs), np.random.default_rng(0)
    for _ in range(8):
        gradients = spectrum(rng)
        mine, theirs = ours.step([gradients]), hooked.step(gradients)
        for a, b, gradient in zip(mine, theirs, gradients, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
            assert np.abs(a - gradient).max() > 1e-2  # neither has sent all


@pytest.mark.parametrize("ranks", [2, 3])
def test_equals_the_hook_on_the_mean(ranks: int) -> None:
    """Without feedback the exchange is a function of the sum alone."""
    ours = Ours(PowerSGD(rank=3, min_gain=0), ranks)
    hooked, rng = Hooked(3, False, ours.qs), np.random.default_rng(1)
    for _ in range(8):
        gradients = [spectrum(rng) for _ in range(ranks)]
        mean = [np.mean(matrices, axis=0) for matrices in zip(*gradients, strict=True)]
        for a, b in zip(ours.step(gradients), hooked.step(mean), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
