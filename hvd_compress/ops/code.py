"""Codes of a few bits per coordinate, for ``Ops.quantise`` and ``Ops.dequantise``."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np

from hvd_compress.ops.packing import packed_size

Kind = Literal["max", "l2", "clipped", "mean", "means", "one", "powers", "bfloat16", "e4m3", "e5m2", "top"]


class Float8(NamedTuple):
    """Format of 8-bit floats, multiplied by the power of two that makes the largest one `LARGEST`.

    Attributes:
        mantissa: Bits of the mantissa.
        exponent: Exponent of the smallest normal number, in the bits of a float32.
    """

    mantissa: int
    exponent: int


FLOAT8 = {"e4m3": Float8(3, 127 - 14), "e5m2": Float8(2, 127 - 29)}
"""OCP's formats. Their largest numbers, 1.75 * 2^8 = 448 and 1.75 * 2^15 = 57344, are `LARGEST` here."""

LARGEST = 1.75
"""Largest 8-bit float. With 448 or 57344 the inverse of a small scale would overflow float32."""


def count(ratio: float, numel: int) -> int:
    """Return how many of ``numel`` coordinates a ratio keeps: rounded, and at least one."""
    return min(numel, max(1, round(ratio * numel)))


class Record(NamedTuple):
    """Layout of the largest coordinates of a block: their indices, two bits of value each, and whole bytes.

    Ascending indices take about ``2 + log2(block / kept)`` bits each (Elias, Efficient Storage and Retrieval by Content
    and Address of Static Files, 1974): of the first `highs` bits, number ``(i >> low) + r`` is set for the r-th index
    i. Then each coordinate has ``low + 2`` bits, the lowest first: whether it is negative, whether it is large, and the
    low bits of its index.

    Attributes:
        kept: Coordinates per block.
        low: Low bits of an index.
        highs: Bits for the high parts of all indices.
    """

    kept: int
    low: int
    highs: int

    @classmethod
    def of(cls, size: int, ratio: float) -> Record:
        """Return the layout for blocks of ``size`` coordinates, of which a ratio is kept."""
        kept = count(ratio, size)
        low = int(math.log2(size / kept))
        return cls(kept, low, kept + (size - 1 >> low))

    @property
    def bits(self) -> int:
        """Bits of a block."""
        return self.highs + self.kept * (self.low + 2)

    @property
    def size(self) -> int:
        """Bytes of a block."""
        return -(-self.bits // 8)


class Code(NamedTuple):
    """Code of coordinates. The payload is the scales of all blocks, if any, followed by the packed codes.

    Attributes:
        kind: Values that numbers are rounded to.

            - ``"max"``, ``"l2"``, ``"clipped"``: multiples of ``scale / L``, ``L = 2^(bits-1) - 1``. The scale of a
              block is its largest magnitude, its L2 norm, or the largest magnitude after clipping to ``clip`` times its
              root mean square.
            - ``"mean"``, ``"means"``: the sign (1 for 0), times the mean magnitude of the block, or of the coordinates
              with that sign.
            - ``"one"``: the sign. All zeros have the same one, drawn by the seed.
            - ``"powers"``: powers of two; 7 bits hold the exponent relative to the largest one.
            - ``"bfloat16"``: the nearest bfloat16.
            - ``"e4m3"``, ``"e5m2"``: 8-bit floats, times ``scale / LARGEST``. The scale of a block is its largest
              magnitude.
            - ``"top"``: the largest coordinates of a block keep their sign, and one of two magnitudes: the mean of
              those above the mean, or of the others. All others are zero. The scales are these two, as bfloat16, first
              the larger ones of all blocks; a `Record` follows for each block.
        bits: Bits per coordinate: 2 to 8 for levels, 1 for signs, 8 for powers and 8-bit floats, 16 for bfloat16, 2 for
            the largest.
        block: Coordinates that share a scale.
        clip: See ``"clipped"``.
        dither: Round stochastically, without bias; otherwise to the nearest.
        ratio: Share of the coordinates of a block that ``"top"`` keeps.
    """

    kind: Kind
    bits: int
    block: int = 1
    clip: float = 0.0
    dither: bool = True
    ratio: float = 1.0

    @property
    def levels(self) -> int:
        """Number L of levels on each side of zero."""
        return int(2 ** (self.bits - 1) - 1)

    @property
    def float8(self) -> Float8 | None:
        """Format of the 8-bit floats; None for other kinds."""
        return FLOAT8.get(self.kind)

    @property
    def top(self) -> float:
        """Number by which a scale is divided before a level or an 8-bit float is multiplied by it."""
        return LARGEST if self.float8 else self.levels

    @property
    def scales(self) -> int:
        """Number of scales per block, in the dtype of the coordinates."""
        return {"one": 0, "means": 2, "powers": 0, "bfloat16": 0, "top": 0}.get(self.kind, 1)

    def size(self, n: int, dtype: str) -> int:
        """Return the bytes of ``n`` coordinates, with scales of this dtype."""
        if self.kind in ("powers", "bfloat16"):
            return n + 1 if self.kind == "powers" else 2 * n
        size = max(1, min(n, self.block))
        blocks = -(-n // size)
        if self.kind == "top":
            return blocks * (4 + Record.of(size, self.ratio).size)
        return self.scales * blocks * np.dtype(dtype).itemsize + packed_size(n, self.bits)
