"""Deep Gradient Compression: top-k by a threshold from a sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import World
from hvd_compress.core.method import Counted, Example, check_range, register
from hvd_compress.methods.sparse import Sparse
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.code import count

FEWEST, MOST = 0.8, 1.3
"""Accepted number of coordinates above the sampled threshold, relative to k."""


@register
@dataclass(frozen=True, kw_only=True)
class DGC(Sparse):
    """Top-k of velocities with a sampled threshold (Algorithm 4 of the paper).

    It uses `MomentumCorrection`, with the options ``momentum`` (0.9), ``nesterov`` and ``clip_norm`` (the paper's local
    gradient clipping, off by default). The optimizer must be without momentum. The paper warms up the ratio over the
    first four epochs: see the option ``warmup``.

    With k the target number of coordinates, and a sample of every s-th of the d coordinates from a random start::

        tau = the (k/s)-th largest magnitude of the sample             S_i = {j : |v_i[j]| >= tau}

    If S_i has fewer than 0.8 k or more than 1.3 k members, the exact k largest are sent instead. (The authors' code
    lowers tau step by step if there are too few, and selects again if there are too many.) See `Sparse` for the
    exchange.

    Args:
        ratio: Share of the coordinates that are sent, in (0, 1].
        sample: Share of the coordinates in the sample, in (0, 1]; raised until 2 of the k are expected in it.
        seed: Random seed of the sample's start.
        values: ``"fp32"``, or ``"fp16"`` to send values in 16 bits.
    """

    name = "dgc"
    card = Sparse.card._replace(
        paper=(
            "Lin et al., Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training, 2018"
        ),
        keeps="velocity; step count",
        claim="270 to 600 times less traffic: 97 MB become 0.35 MB for ResNet-50, 488 MB become 0.74 MB for DeepSpeech",
        examples=(Example("dgc:ratio=0.1,sample=0.2"),),
        lossless=("dgc:ratio=1",),
        compared=("dgc:ratio=0.0625,values=fp16", "dgc:ratio=0.0156,values=fp16"),
    )
    memory: ClassVar[Mapping[str, Any]] = {"momentum": 0.9}

    ratio: float = 0.001
    sample: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("ratio", self.ratio, "in (0, 1]", 0 < self.ratio <= 1)
        check_range("sample", self.sample, "in (0, 1]", 0 < self.sample <= 1)
        check_range("seed", self.seed, "in 0 .. 2**32-1", 0 <= self.seed < 2**32)

    def init(self, ops: Ops, bucket: Bucket, world: World) -> Counted:
        return Counted(step=0)

    def select(self, ops: Ops, bucket: Bucket, x: Array, state: Counted) -> tuple[Array, Counted]:
        k = count(self.ratio, bucket.numel)
        stride = max(1, min(int(1 / self.sample), k // 2)) if k < bucket.numel else 1
        places = np.arange(0, bucket.numel - stride + 1, stride)
        start = ops.below(ops.seed(self.seed, bucket.seed, state.step), ops.constant(np.array([stride])))
        sampled = ops.take(x, ops.constant(places) + start)
        tau = ops.kth_magnitude(sampled, min(len(places), max(1, round(k / stride))))

        above = ops.above(x, tau)
        fits = math.ceil(FEWEST * k) <= int(above.shape[0]) <= math.floor(MOST * k)
        return above if fits else ops.top_indices(x, k), Counted(state.step + 1)
