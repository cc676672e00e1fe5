"""bfloat16 on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_compress.collectives import Array
from hvd_compress.methods.quantised import Quantised
from hvd_compress.ops import Ops


@dataclass(frozen=True, kw_only=True)
class BFloat16(Quantised):
    """Round to bfloat16, which has the range of float32 and 8 bits of precision.

    Horovod does not sum bfloat16 everywhere, so each rank sums a part in the gradient's own precision and sends the sum
    back in bfloat16: 16 bits each way, as in a ring allreduce, and one rounding of the sum however many ranks there
    are.

    Args:
        twoway: Off: everyone gets everything by allgather, and the sum is not rounded.
    """

    name = "bf16"
    paper = "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019"
    collective = "alltoall + allgather"
    keeps = "step count"

    twoway: bool = True

    def encode(self, ops: Ops, x: Array, seed: Any) -> Array:
        return ops.to_bytes(ops.to_bfloat16(ops.cast(x, "float32")))

    def decode(self, ops: Ops, data: Array, n: int, dtype: str) -> Array:
        (bits,) = ops.from_bytes(data, ("uint16", n))
        return ops.cast(ops.from_bfloat16(bits), dtype)
