"""CTK: chunked top-k with values of two bits."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_compress.core.method import LARGEST_BLOCK, Example, check_range, check_whole, register
from hvd_compress.methods.quantised import Quantised
from hvd_compress.ops.code import Code


@register
@dataclass(frozen=True, kw_only=True)
class CTK(Quantised):
    """Chunked top-k, with two bits per value: two means per chunk.

    With p_i the gradient of rank i plus its residual, S the ``ratio`` of the coordinates of a chunk with the largest
    magnitudes, m their mean, and S+ those of S above m::

        C(p_i)[j] = sgn(p_i[j]) mean_{S+} |p_i|   if j in S+        sgn(p_i[j]) mean_{S - S+} |p_i|   if j in S - S+
                  = 0                             otherwise         e_i = p_i - C(p_i)

    Each chunk sends the same number of coordinates, so that small gradients are sent too, unlike with `TopK`. Adam
    needs that, as do other optimizers that divide by the magnitude of the gradient. A coordinate takes about
    ``4 - log2(ratio)`` bits, with indices coded as by Elias (Efficient Storage and Retrieval by Content and Address of
    Static Files, 1974), and a chunk 32 bits more, for its two means (bfloat16). With the defaults this is 105 times
    less than float32.

    Args:
        ratio: Share of the coordinates of each chunk that are sent, in (0, 1].
        chunk: Coordinates per chunk.
        twoway: Compress the returned sum too, with error feedback on the servers.
    """

    name = "ctk"
    family = "sparse"
    card = Quantised.card._replace(
        paper="Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, 2025",
        examples=(
            Example("ctk:ratio=0.1,chunk=64", 16 * (4 + 6), gain=1 + 2**-8),
            Example("ctk:ratio=0.1,chunk=64,twoway=on", 3 * 8 * (4 + 6), total="served", gain=1 + 2**-8),
        ),
        compared=("ctk:ratio=0.1", "ctk", "ctk:ratio=0.01"),
    )
    feedback = True
    lags = True
    serves_feedback = True

    ratio: float = 0.03
    chunk: int = 1024

    def __post_init__(self) -> None:
        check_range("ratio", self.ratio, "in (0, 1]", 0 < self.ratio <= 1)
        check_whole("chunk", self.chunk, 1, LARGEST_BLOCK)

    @property
    def code(self) -> Code:
        return Code("top", 2, self.chunk, ratio=self.ratio)
