"""Block8: 8-bit integers, with a scale per small block."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_compress.core.method import LARGEST_BLOCK, Example, check_whole, register
from hvd_compress.methods.quantised import Quantised
from hvd_compress.ops.code import Code


@register
@dataclass(frozen=True, kw_only=True)
class Block8(Quantised):
    """Round to 8-bit integers, with a scale for each small block of coordinates.

    As in Dettmers et al. (section 2.1), but with evenly spaced levels, in each block::

        s = max |x_j|            C(x_j) = floor(127 x_j / s + 1/2) s / 127

    A large coordinate makes only its own block less precise. The scale is a float32, so a coordinate takes
    ``8 + 32 / block`` bits.

    As in qgZ of ZeRO++, ranks exchange codes by alltoall, and decode them before they sum their shard. There the
    gradient stays sharded, in 4 bits; here the sum returns by allgather, with the same code.

    Rounding to nearest is biased, so servers use error feedback. For unbiased rounding, take ``qsgd:bits=8``.

    Args:
        block: Coordinates that share a scale; 32 to 256 are usual.
        twoway: Compress the returned sum too; if off, all ranks receive all codes by allgather.
    """

    name = "block8"
    card = Quantised.card._replace(
        paper=(
            "Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model Training, 2023; "
            "Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2021"
        ),
        collective="alltoall + allgather, or allgather",
        claim="4x less communication, together with other techniques, and up to 2.16x the throughput on 384 GPUs",
        examples=(
            Example("block8:block=64", 3 * (8 * 4 + 500), total="served"),
            Example("block8:block=64,twoway=off", 16 * 4 + 1000),
        ),
        compared=("block8", "block8:block=32"),
    )
    serves_feedback = True

    block: int = 128
    twoway: bool = True

    def __post_init__(self) -> None:
        check_whole("block", self.block, 1, LARGEST_BLOCK)

    @property
    def code(self) -> Code:
        return Code("max", 8, self.block, dither=False)
