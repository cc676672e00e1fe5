"""Dense methods, the baselines: no compression, and half precision."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllReduce, Array, Exchange, Exchanging, State, World
from hvd_compress.methods.base import Example, Method, register
from hvd_compress.ops import Ops


@register
@dataclass(frozen=True)
class Dense(Method):
    """No compression: ``total = sum_i g_i``."""

    name = "none"
    family = "dense"
    paper = "uncompressed synchronous SGD"
    boundary = True
    examples = (Example("none", 4000),)
    lossless = ("none",)
    unbiasedness = "exact"
    collective = "allreduce"
    linear = True

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, keep: bool = False
    ) -> Exchanging:
        total = yield AllReduce(x, donate=True)
        return Exchange(total, state)


@register
@dataclass(frozen=True)
class Half(Method):
    """Half precision on the wire: ``total = sum_i fp16(g_i)``, summed in float16 as Horovod's own fp16 does.

    Sums beyond the range of float16 (65504) become inf; values of a rank beyond it stay in its residual. Integers are
    not compressed.
    """

    name = "fp16"
    family = "dense"
    paper = "Micikevicius et al., Mixed Precision Training, 2018"
    retains = True
    boundary = True
    examples = (Example("fp16", 2000, total="rounded"),)
    collective = "allreduce"
    linear = True

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: State, world: World, keep: bool = False
    ) -> Exchanging:
        dtype = ops.dtype(x)
        if not dtype.startswith(("float", "bfloat")):
            total = yield AllReduce(x)
            return Exchange(total, state)
        sent = ops.cast(x, "float16")
        total = yield AllReduce(sent)
        left = None
        if keep:
            decoded = ops.cast(sent, dtype)
            left = x - ops.where(ops.is_finite(decoded), decoded, 0.0)
        return Exchange(ops.cast(total, dtype), state, left)
