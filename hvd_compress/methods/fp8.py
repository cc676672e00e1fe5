"""FP8: 8-bit floats, with a scale per block."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_compress.core.method import LARGEST_BLOCK, Example, check_range, check_whole, register
from hvd_compress.methods.quantised import Quantised
from hvd_compress.ops.code import FLOAT8, Code


@register
@dataclass(frozen=True, kw_only=True)
class FP8(Quantised):
    """Round to 8-bit floats, with a scale for each block (table 1 and section 3.2 of the paper).

    With F the largest number of the format, and R rounding to its nearest number, half-way to even::

        s = max |x_j|            C(x_j) = R(x_j F / s) s / F

    ``e4m3`` has 4 bits of exponent and 3 of mantissa, F = 448; ``e5m2`` has 5 and 2, F = 57344. Both have subnormal
    numbers; codes are those of PyTorch's ``float8_e4m3fn`` and ``float8_e5m2``. The relative error is at most 2^-4 or
    2^-3, down to about 2^-15 or 2^-30 of s.

    The paper scales whole tensors, and recommends ``e5m2`` for gradients. Here each block has a scale of its own in
    float32, so that gradients of different magnitudes can share a bucket, and the more precise ``e4m3`` is the
    default. Codes are decoded before they are summed, in the bucket's dtype.

    Rounding to nearest is biased, so servers use error feedback. Stochastic rounding is unbiased, and needs none.

    Args:
        format: ``"e4m3"``, which is more precise, or ``"e5m2"``, which has the larger range.
        block: Coordinates that share a scale.
        stochastic: Round up or down at random, without bias, instead of to the nearest.
        seed: Random seed of stochastic rounding.
        twoway: Compress the returned sum too; if off, all ranks receive all codes by allgather.
    """

    name = "fp8"
    card = Quantised.card._replace(
        paper="Micikevicius et al., FP8 Formats for Deep Learning, 2022",
        collective="alltoall + allgather, or allgather",
        unbiased="with stochastic=on",
        claim="training with tensors in FP8 is as accurate as in 16 bits, for models of up to 175B parameters",
        examples=(
            Example("fp8:block=64", 3 * (8 * 4 + 500), total="served"),
            Example("fp8:format=e5m2,block=64,twoway=off", 16 * 4 + 1000),
            Example("fp8:block=64,stochastic=on", 3 * (8 * 4 + 500), total="lossy", unbiased=True),
        ),
        compared=("fp8", "fp8:format=e5m2", "fp8:stochastic=on"),
    )
    serves_feedback = True

    format: str = "e4m3"
    block: int = 1024
    stochastic: bool = False
    seed: int = 0
    twoway: bool = True

    def __post_init__(self) -> None:
        check_range("format", self.format, "'e4m3' or 'e5m2'", self.format in FLOAT8)
        check_whole("block", self.block, 1, LARGEST_BLOCK)
        check_range("seed", self.seed, "in 0 .. 2**32-1", 0 <= self.seed < 2**32)

    @property
    def _serves(self) -> bool:
        return super()._serves and not self.stochastic

    @property
    def code(self) -> Code:
        return Code("e5m2" if self.format == "e5m2" else "e4m3", 8, self.block, dither=self.stochastic)
