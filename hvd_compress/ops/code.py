"""How coordinates are written in a few bits: the parameters of ``Ops.quantise`` and ``Ops.dequantise``."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from hvd_compress.ops.packing import packed_size

Kind = Literal["max", "l2", "clipped", "mean", "means", "one", "powers", "bfloat16"]


class Code(NamedTuple):
    """A code: what travels is one or two scales for each block of coordinates, then the packed codes.

    Attributes:
        kind: What the numbers are rounded to.

            - ``"max"``, ``"l2"``, ``"clipped"``: multiples of ``scale / L``, ``L = 2^(bits-1) - 1``. The scale of a
              block is its largest magnitude, its L2 norm, or the largest magnitude after clipping to ``clip`` times its
              root mean square.
            - ``"mean"``, ``"means"``, ``"one"``: their sign, of 0 as well 1, times the mean magnitude of the block;
              the mean of those of that sign; or 1.
            - ``"powers"``: powers of two, by the exponents of float32 in 7 bits below that of the largest.
            - ``"bfloat16"``: the nearest bfloat16.
        bits: Width of a code: 2 to 8, 1 for signs, 8 for powers, 16 for bfloat16.
        block: Coordinates that share a scale.
        clip: See ``"clipped"``.
        dither: Round up or down at random, so that the mean is right; otherwise to the nearest.
    """

    kind: Kind
    bits: int
    block: int = 1
    clip: float = 0.0
    dither: bool = True

    @property
    def levels(self) -> int:
        """L: levels on each side of zero."""
        return int(2 ** (self.bits - 1) - 1)

    @property
    def scales(self) -> int:
        """How many scales a block has."""
        return {"one": 0, "means": 2, "powers": 0, "bfloat16": 0}.get(self.kind, 1)

    def size(self, n: int, dtype: str) -> int:
        """How many bytes ``n`` coordinates take, with scales of this dtype."""
        if self.kind in ("powers", "bfloat16"):
            return n + 1 if self.kind == "powers" else 2 * n
        blocks = -(-n // max(1, min(n, self.block)))
        return self.scales * blocks * np.dtype(dtype).itemsize + packed_size(n, self.bits)
