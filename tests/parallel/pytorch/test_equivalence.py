"""Where nothing is lost, training is what it is without compression, in every way of using stock Horovod."""

from __future__ import annotations

import functools
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from parallel.pytorch.training import EVEN, LOSSLESS, ODD, Job, assert_ranks_equal, make_model
from torch import nn

from hvd_compress.torch import Compression

USES: dict[str, dict[str, Any]] = {
    "average": {},
    "sum": {"op": hvd.Sum, "lr": 0.03},
    "predivide": {"gradient_predivide_factor": 2.0},
    "groups": {"groups": 2},
    "passes": {"backward_passes_per_step": 2},
    "groups and passes": {"groups": 2, "backward_passes_per_step": 2},
}


@functools.cache
def plain(use: str) -> Job:
    """The same training with stock Horovod alone."""
    return Job(hvd.Compression.none, **USES[use]).run(4)


def assert_equal_training(expected: Job, job: Job) -> None:
    """Both have trained, to the same weights up to float rounding."""
    start = torch.cat([p.detach().flatten() for p in make_model().parameters()])
    if expected.weights.shape == start.shape:
        assert (expected.weights - start).abs().max() > 0.01
    torch.testing.assert_close(job.weights, expected.weights, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("spec", "use"), [*((LOSSLESS[0], use) for use in USES), *((spec, "groups") for spec in ("none", *LOSSLESS[1:]))]
)
def test_lossless_training_is_plain_training(spec: str, use: str) -> None:
    compressed = Job(spec, **USES[use]).run(4)
    assert_equal_training(plain(use), compressed)
    assert_ranks_equal(compressed.weights)


@pytest.mark.parametrize("use", ["predivide", "groups and passes"])
def test_fp16_is_horovods_own_fp16(use: str) -> None:
    mine, theirs = Job("fp16", **USES[use]).run(3), Job(hvd.Compression.fp16, **USES[use]).run(3)
    assert torch.equal(mine.weights, theirs.weights)


@pytest.mark.parametrize("spec", ["none", LOSSLESS[0]])
def test_process_sets_train_apart(spec: str) -> None:
    """Two disjoint sets at once: each trains as it does without compression, and not as the other."""
    process_set = EVEN if hvd.rank() % 2 == 0 else ODD
    alone = Job(hvd.Compression.none, process_set=process_set).run(5)
    compressed = Job(spec, process_set=process_set).run(5)
    assert_equal_training(alone, compressed)
    assert_ranks_equal(compressed.weights, process_set)


def test_a_group_list_of_parameters() -> None:
    models = [make_model(), make_model()]
    jobs = []
    for model, compression in zip(models, [hvd.Compression.none, Compression.topk(ratio=1.0)], strict=True):
        parameters = list(model.parameters())
        jobs.append(Job(compression, model, groups=[parameters[:3], parameters[3:5]]).run(5))
    assert_equal_training(*jobs)


class Odds(nn.Module):
    """Parameters of every unusual kind: no axis, no elements, one element, double precision, channels last."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.one = nn.Parameter(torch.ones(1))
        self.wide = nn.Parameter(torch.randn(32, 40, generator=generator, dtype=torch.float64))
        conv = torch.randn(16, 4, 3, 3, generator=generator) / 10
        self.conv = nn.Parameter(conv.to(memory_format=torch.channels_last))
        self.head = nn.Parameter(torch.randn(40, 10, generator=generator) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x.double() @ self.wide).float() * self.scale + self.empty.sum()
        image = x.reshape(-1, 1, 4, 8).repeat(1, 4, 1, 1).contiguous(memory_format=torch.channels_last)
        image = nn.functional.conv2d(image, self.conv, padding=1)
        return hidden @ self.head + image.mean((1, 2, 3))[:, None] * self.one


@pytest.mark.parametrize("spec", ["topk:ratio=1.0,min_size=0,vectors=on", "int8:min_size=0"])
def test_unusual_parameters(spec: str) -> None:
    """Stock Horovod refuses non-contiguous gradients, so the plain model keeps its convolution contiguous."""
    models = [Odds(), Odds()]
    models[0].conv = nn.Parameter(models[0].conv.detach().contiguous())
    lossless = "ratio=1.0" in spec
    jobs = [Job(c, model, lr=0.01).run(5) for c, model in zip((hvd.Compression.none, spec), models, strict=True)]
    torch.testing.assert_close(jobs[1].weights, jobs[0].weights, rtol=0, atol=2e-5 if lossless else 0.05)
    assert_ranks_equal(jobs[1].weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_parameters(dtype: torch.dtype) -> None:
    """Horovod cannot even sum bfloat16; residuals are float32."""
    job = Job("topk:ratio=0.1", make_model().to(dtype), lr=0.05)
    for step in range(5):
        x = torch.ones(4, 32, dtype=dtype) * (1 + hvd.rank() + step) / 8
        job.model(x).square().mean().backward()
        job.optimizer.step()
        assert all(p.grad is not None and p.grad.dtype == dtype for p in job.model.parameters())
        job.optimizer.zero_grad()
    assert_ranks_equal(job.weights)
    (session,) = job.compression.state_dict()["sessions"].values()
    residuals = [leaves["residual"] for leaves in session["buckets"].values() if "residual" in leaves]
    assert residuals and all(residual.dtype == torch.float32 for residual in residuals)


def embedding_model(sparse: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.ModuleDict({"embed": nn.Embedding(50, 32, sparse=sparse), "net": make_model()})


def embedding_loss(model: nn.ModuleDict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model["net"](x + model["embed"](y + hvd.rank())), y)


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_beside_compressed_ones(as_dense: bool) -> None:
    jobs = []
    for compression in (hvd.Compression.none, Compression.topk(ratio=1.0)):
        model = embedding_model(sparse=True)
        job = Job(compression, model, sparse_as_dense=as_dense)
        job.optimizer.param_groups[0]["momentum"] = 0.0  # SGD with momentum takes no sparse gradients
        jobs.append(job.run(5, embedding_loss))
    assert_equal_training(*jobs)
    assert_ranks_equal(jobs[1].weights)
