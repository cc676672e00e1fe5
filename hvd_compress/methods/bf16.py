"""bfloat16 on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_compress.core.method import Example, register
from hvd_compress.methods.quantised import Quantised
from hvd_compress.ops.code import Code


@register
@dataclass(frozen=True, kw_only=True)
class BFloat16(Quantised):
    """Round to bfloat16, which has the range of float32 and 8 bits of precision.

    Horovod cannot sum bfloat16 everywhere. So each rank sums one shard in the gradient's own dtype and sends the sum
    back in bfloat16: 16 bits each way, as in a ring allreduce, and the sum is rounded only once.

    Args:
        twoway: If off, all ranks receive all gradients by allgather, and the sum is not rounded.
    """

    name = "bf16"
    family = "dense"
    card = Quantised.card._replace(
        paper="Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019",
        collective="alltoall + allgather",
        keeps="step count",
        # Both halves go out, and the sum of one comes back.
        examples=(Example("bf16", 2 * 500 * 2 + 500 * 2, total="rounded", gain=1.01),),
    )
    boundary = True

    twoway: bool = True

    @property
    def code(self) -> Code:
        return Code("bfloat16", 16)
