"""QSGD and TernGrad: stochastic rounding to a few levels, with a scale per rank and block."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_compress.core.method import LARGEST_BLOCK, Example, check_range, check_whole, register
from hvd_compress.methods.quantised import Quantised
from hvd_compress.ops.code import Code


@dataclass(frozen=True, kw_only=True)
class _Levels(Quantised):
    """Stochastic rounding to levels of a block's scale."""

    card = Quantised.card._replace(
        keeps="step count",
    )

    block: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("block", self.block, 1, LARGEST_BLOCK)
        check_range("seed", self.seed, "in 0 .. 2**32-1", 0 <= self.seed < 2**32)


@register
@dataclass(frozen=True, kw_only=True)
class QSGD(_Levels):
    """Quantised SGD: unbiased rounding to s levels of the norm of each block (section 3.1 of the paper).

    With ``r = s |x_j| / ||x||`` and u uniform in [0, 1)::

        Q(x_j) = ||x|| sgn(x_j) floor(r + u) / s,        s = 2^(bits-1) - 1,        E[Q(x)] = x

    With the L2 norm the variance is at most ``min(d/s^2, sqrt(d)/s) ||x||^2`` for blocks of d. The maximum norm is
    always more accurate; the L2 norm sends more zeros. The paper encodes the integers with Elias codes; here each takes
    ``bits`` bits, so that all ranks send the same number of bytes.

    Args:
        bits: Bits per coordinate, 2 to 8.
        norm: ``"max"`` or ``"l2"``. With ``"l2"`` the rounding error may exceed the value, so error feedback would
            diverge and is not supported.
        block: Coordinates that share a norm.
        seed: Random seed.
        twoway: Compress the returned sum too.
    """

    name = "qsgd"
    card = _Levels.card._replace(
        paper="Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, 2017",
        unbiased="yes",
        claim="1.8x faster training of ResNet-152 on ImageNet with 16 GPUs",
        examples=(
            Example("qsgd:block=64", 16 * 4 + 500, unbiased=True),
            Example("qsgd:block=64,bits=3,norm=l2", 16 * 4 + 250 + 125, unbiased=True, gain=6),
            Example("qsgd:block=64,twoway=on", 3 * (8 * 4 + 500 // 2), total="lossy", unbiased=True),
        ),
        compared=("qsgd:bits=8", "qsgd:bits=4", "qsgd:bits=4,norm=l2", "qsgd:bits=4,twoway=on", "qsgd:bits=2"),
    )

    bits: int = 4
    norm: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("bits", self.bits, "2 to 8", 2 <= self.bits <= 8)
        check_range("norm", self.norm, "'max' or 'l2'", self.norm in ("max", "l2"))

    @property
    def supports_feedback(self) -> bool:
        return self.norm == "max"

    @property
    def bound(self) -> float | None:
        s = 2 ** (self.bits - 1) - 1
        return None if self.twoway else min(self.block / s**2, self.block**0.5 / s)

    @property
    def code(self) -> Code:
        return Code("l2" if self.norm == "l2" else "max", self.bits, self.block)


@register
@dataclass(frozen=True, kw_only=True)
class TernGrad(_Levels):
    """Ternary gradients: clip, then round to -1, 0 or 1 times the largest magnitude (section 3 of the paper).

    With sigma the root mean square of a block::

        x = clip(x, -c sigma, c sigma)        s = max |x|        t_j = s sgn(x_j) [u < |x_j| / s]

    Clipping reduces s and the rounding error but adds a bias; with ``clip=0``, E[t] = x. The paper takes one scale per
    layer; here there is one per block.

    Args:
        clip: c, in multiples of sigma; 0 for no clipping.
        block: Coordinates that share a scale.
        seed: Random seed.
        twoway: Compress the returned sum too.
    """

    name = "terngrad"
    card = _Levels.card._replace(
        paper="Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning, 2017",
        unbiased="with clip=0",
        claim="no loss of accuracy with AlexNet, less than 2 % on average with GoogLeNet",
        examples=(
            Example("terngrad:block=64", 16 * 4 + 250),
            Example("terngrad:block=64,clip=0", 16 * 4 + 250, unbiased=True),
        ),
        compared=("terngrad", "terngrad:clip=0"),
    )

    clip: float = 2.5
    block: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("clip", self.clip, "at least 0", self.clip >= 0)

    @property
    def code(self) -> Code:
        return Code("clipped", 2, self.block, self.clip)
