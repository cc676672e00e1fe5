"""Sums that are decoded a part at a time are those that are decoded as a whole, wherever they are written."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from catalogue import EXAMPLES, bare, one_in
from torch import Tensor
from worlds import bucket_of, normal, ops_of

from hvd_compress.core.collectives import World
from hvd_compress.errors import ExchangeError
from hvd_compress.ops import delivery
from hvd_compress.ops.torch import TorchCpuOps, TorchOps
from hvd_compress.ops.torch_cuda import TorchCudaOps
from hvd_compress.ops.totals import LowRankSum, SparseSum, dense
from hvd_compress.transport.lockstep import run_lockstep_encoded

WORLD = World(0, 1)
SHAPES = ((40, 30), (7,), (60, 50), (1, 3), (33, 20))
BUCKET = bucket_of(*SHAPES)
KINDS = {
    "contiguous": lambda shape: torch.full(shape, torch.nan),
    "columns first": lambda shape: torch.full(shape[::-1], torch.nan).permute(*reversed(range(len(shape)))),
    "halves": lambda shape: torch.full(shape, torch.nan, dtype=torch.float16),
    "doubles": lambda shape: torch.full(shape, torch.nan, dtype=torch.float64),
}


def delivered(spec: str, ranks: int, kind: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return what is written to tensors of some kind, and what should be."""
    method, ops = bare(spec), TorchCpuOps()
    states = [method.init(ops, BUCKET, World(0, ranks)) for _ in range(ranks)]
    flights = run_lockstep_encoded(ops, method, BUCKET, normal(BUCKET, ranks), states)
    total = flights[0].ended.total
    whole = dense(ops, total) / 3
    spans = [slice(end - size, end) for end, size in zip(accumulate(BUCKET.sizes), BUCKET.sizes, strict=True)]
    grads = [KINDS[kind](shape) for shape in SHAPES]
    order = [3, 0, 4, 1]  # as gradients come; one does not
    assert math.isfinite(ops.deliver(total, [(spans[i], grads[i]) for i in order], 1 / 3))
    assert grads[2].isnan().all()
    return [grads[i] for i in order], [whole[spans[i]].view(SHAPES[i]).to(grads[0].dtype) for i in order]


@pytest.mark.parametrize(
    ("spec", "ranks", "part"),
    one_in(4, ((spec, *case) for spec in EXAMPLES for case in [(1, 1000), (2, 64), (3, 2**17)])),
)
def test_parts_make_the_whole(spec: str, ranks: int, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "PART", part)
    for got, want in zip(*delivered(spec, ranks, "contiguous"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["topk:ratio=0.05", "qsgd", "efsignsgd:twoway=on", "powersgd:rank=2", "topkc"])
def test_any_tensor_is_written_to(spec: str, kind: str) -> None:
    tolerance = 1e-3 if kind == "halves" else 1e-5
    for got, want in zip(*delivered(spec, 2, kind), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ops", [TorchOps(), TorchCudaOps("cpu")], ids=lambda ops: type(ops).__name__)
def test_the_frameworks_own_way_is_the_same(ops: TorchOps, kind: str) -> None:
    """As on a device that kernels cannot get to, and on a GPU."""
    grads = [KINDS[kind](shape) for shape in SHAPES]
    spans = [slice(end - size, end) for end, size in zip(accumulate(BUCKET.sizes), BUCKET.sizes, strict=True)]
    method, plain = bare("qsgd"), TorchOps()
    flights = run_lockstep_encoded(
        plain, method, BUCKET, normal(BUCKET, 2), [method.init(plain, BUCKET, World(0, 2)) for _ in range(2)]
    )
    whole = dense(plain, flights[0].ended.total)
    ops.deliver(whole, list(zip(spans, grads, strict=True)), 0.5)
    ops.deliver(whole, [], 0.5)
    np.testing.assert_array_equal(torch.cat([g.flatten() for g in grads]), (whole * 0.5).to(grads[0].dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ops", [TorchCpuOps(), TorchOps(), TorchCudaOps("cpu")], ids=lambda ops: type(ops).__name__)
def test_what_is_not_finite_where_it_is_written_is_told(ops: TorchOps, kind: str) -> None:
    ones, indices = torch.ones(5, 1), torch.arange(25)
    totals: list[Any] = [torch.full((25,), 3e38), LowRankSum([ones * 2e19], [ones * 1e19])]
    if isinstance(ops, TorchCpuOps):
        totals.append(SparseSum([(indices, indices * 1e37)], 25, "float32"))
    for total in totals:
        for factor in (1e-36, 10.0):
            peak = ops.deliver(total, [(slice(0, 25), KINDS[kind]((5, 5)))], factor)
            assert math.isfinite(peak) == (factor < 1)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_codes_of_a_wrong_length_are_refused_before_they_are_decoded(framework: str) -> None:
    """When all ranks can still be told."""
    ops, method = ops_of(framework), bare("qsgd")
    exchanging = method.exchange(
        ops, BUCKET, ops.constant(normal(BUCKET, 1)[0]), method.init(ops, BUCKET, World(0, 1)), WORLD
    )
    message = next(exchanging)
    with pytest.raises(ExchangeError, match="has the wrong length"):
        exchanging.send(ops.constant(np.asarray(message.array)[None, :-1]))
