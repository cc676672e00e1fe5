"""THC: all ranks quantise with the same range, so that the codes themselves can be summed."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllReduce, Exchange, Exchanging, SaturatingSum, World
from hvd_compress.core.method import LARGEST_BLOCK, Card, Counted, Example, Method, check_range, register, rows_of
from hvd_compress.errors import SpecError
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.lanes import pack_lanes, width_of

TABLES = {
    2: (0, 13, 21, 34),
    3: (0, 10, 15, 19, 23, 27, 32, 42),
    4: (0, 3, 5, 7, 9, 11, 13, 14, 16, 17, 19, 21, 23, 25, 27, 30),
}
"""The authors' tables of levels for the normal distribution, on a grid of integers, for 2, 3 and 4 bits."""

_WASTE = 8
"""A full rotation pads with at most 1/8 of the coordinates."""


@register
@dataclass(frozen=True)
class THC(Method):
    """Tensor homomorphic compression: shared range, randomised Hadamard rotation, integer sum.

    With shared random signs D, H the normalised Hadamard matrix, n ranks and u uniform in [0, 1), for each block of m
    coordinates::

        x_i = H D g_i                                       (about normal for any g_i)
        M = T max_i ||g_i||_2 / sqrt(m)                     (allreduce MAX; T: P(|N(0,1)| > T) = clip)
        y_i = floor(L x_i / M + u_i) within +-L             (stochastic rounding, L = 2^(bits-1) - 1)
        total = D H (M / L) sum_i y_i                       (the sum of the integers)

    ``overflow="widen"`` sums in lanes wide enough for any sum (see `hvd_compress.ops.lanes`): 5 bits for 2 ranks of
    4 bits, 6 bits for 3 and 4 ranks. ``"saturate"`` sends the sum in ``bits`` bits too and clips it: rotated
    coordinates are centred and partly cancel. It widens M by ``n^headroom``. With 0, sums of independent gradients are
    clipped beyond ``T / sqrt(n)`` of their standard deviations, with 0.5 beyond T of them; with 1 even equal gradients
    fit. The rounding error grows by the same factor.

    Rotation costs time. ``"partial"`` rotates blocks that fit the cache, with a range per block (Han et al., Beyond
    Throughput and Compression Ratios, 2024). ``"full"`` rotates blocks as large as the bucket allows. ``"none"`` does
    not rotate, and the range is that of the largest coordinate.

    Args:
        bits: Bits per coordinate: 2, 3, 4 or 8.
        rotation: ``"partial"``, ``"full"`` or ``"none"``.
        block: Coordinates per block unless the rotation is full; a power of two.
        levels: ``"uniform"``, or ``"table"`` for the authors' levels for normally distributed values (2 to 4 bits, in
            wider lanes).
        overflow: ``"widen"`` or ``"saturate"`` (2, 4 or 8 bits, uniform levels).
        headroom: With ``"saturate"``, widen the range by the number of ranks to this power, in [0, 1].
        clip: Share of the rotated coordinates that may be clipped, for a finer range; 0 takes the largest coordinate as
            the range and is unbiased.
        seed: Random seed, the same on all ranks.
    """

    name = "thc"
    family = "quantised"
    card = Card(
        paper="Li et al., THC: Accelerating Distributed Deep Learning Using Tensor Homomorphic Compression, 2024",
        collective="2 allreduces (max, sum), or allreduce + saturating sum",
        keeps="step count",
        unbiased="with clip=0",
        claim="1.40 to 1.47 times faster to the target accuracy with aggregation in switches, else 1.28 to 1.33 times",
        examples=(
            Example("thc:block=64", 16 * 4 + -(-1024 // 6) * 4, gain=6),  # sums of two 4-bit codes in lanes of 5 bits
            Example("thc:block=64,clip=0", 16 * 4 + -(-1024 // 6) * 4, unbiased=True, gain=6),
            Example("thc:rotation=full,clip=0", 4 + -(-1024 // 6) * 4, unbiased=True, gain=6),
            Example("thc:block=64,rotation=none", 16 * 4 + -(-1024 // 6) * 4, unbiased=True, gain=6),
            Example(
                "thc:block=64,levels=table,clip=0", 16 * 4 + -(-1024 // 5) * 4, unbiased=True, gain=6
            ),  # lanes of 6 bits
            Example("thc:block=64,overflow=saturate", 16 * 4 + 3 * 256, total="lossy", gain=6),
        ),
        compared=(
            "thc:bits=8",
            "thc:bits=4",
            "thc:bits=4,levels=table",
            "thc:bits=4,overflow=saturate",
            "thc:bits=2,overflow=saturate",
        ),
        rotates=True,
    )
    feedback = True
    retains = True

    bits: int = 4
    rotation: str = "partial"
    block: int = 1024
    levels: str = "uniform"
    overflow: str = "widen"
    headroom: float = 0.25
    clip: float = 1 / 1024
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("bits", self.bits, "2, 3, 4 or 8", self.bits in (2, 3, 4, 8))
        check_range(
            "rotation", self.rotation, "'partial', 'full' or 'none'", self.rotation in ("partial", "full", "none")
        )
        check_range(
            "block",
            self.block,
            f"a power of two in 2 .. {LARGEST_BLOCK}",
            2 <= self.block <= LARGEST_BLOCK and not self.block & self.block - 1,
        )
        check_range("levels", self.levels, "'uniform' or 'table'", self.levels in ("uniform", "table"))
        check_range("overflow", self.overflow, "'widen' or 'saturate'", self.overflow in ("widen", "saturate"))
        check_range("headroom", self.headroom, "in [0, 1]", 0 <= self.headroom <= 1)
        check_range("clip", self.clip, "in [0, 1)", 0 <= self.clip < 1)
        check_range("seed", self.seed, "in 0 .. 2**32-1", 0 <= self.seed < 2**32)
        if self.levels == "table" and (self.bits not in TABLES or self.overflow == "saturate"):
            raise SpecError("levels=table requires bits=2, 3 or 4 and overflow=widen")
        if self.overflow == "saturate" and self.bits == 3:
            raise SpecError("overflow=saturate requires bits=2, 4 or 8, so that a byte holds whole codes")

    @property
    def top(self) -> int:
        """Largest integer that a rank sends."""
        return TABLES[self.bits][-1] // 2 if self.levels == "table" else int(2 ** (self.bits - 1) - 1)

    def init(self, ops: Ops, bucket: Bucket, world: World) -> Counted:
        return Counted(step=0)

    def columns(self, n: int) -> int:
        """Return the number of coordinates per block; the last block is padded with zeros."""
        block = self.block
        if self.rotation == "full":
            block = 2 ** (n - 1).bit_length()
            while -n % block * _WASTE > n and block > 1:
                block //= 2
        return block

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: Counted, world: World, return_error: bool = False
    ) -> Exchanging:
        rotation, columns = None, self.columns(bucket.numel)
        blocks = -(-bucket.numel // columns)
        if self.rotation == "none":
            rows = rows_of(ops, x, columns)
        else:
            rotation = ops.seed(self.seed, bucket.seed, state.step, 0)
            rows = ops.rotate(x, rotation, columns)
        largest = yield AllReduce(self._range(ops, rows), op="max")
        wider = world.size**self.headroom if self.overflow == "saturate" else 1.0
        limits = largest * wider

        seed = ops.seed(self.seed, bucket.seed, state.step, world.rank + 1)
        width = width_of(self.top * world.size)
        if self.overflow == "saturate":
            y = self.round(ops, rows, limits, seed)
            codes = ops.pack(ops.cast(ops.reshape(y + self.top, (-1,)), "uint8"), self.bits)
            summed = yield SaturatingSum(codes, self.bits, self.top)
            sums = ops.cast(ops.unpack(summed, self.bits, blocks * columns), "int32") - self.top
            mine, total = (pack_lanes(ops, ops.cast(part, "int32"), width) for part in (y, sums))
        else:
            if self.levels == "uniform":
                mine = ops.to_lanes(rows, limits, self.top, width, seed)
            else:
                mine = pack_lanes(ops, ops.cast(self.round(ops, rows, limits, seed), "int32"), width)
            total = yield AllReduce(mine)

        def decode(lanes: Array) -> Array:
            decoded = ops.from_lanes(lanes, limits, self.top, width, blocks, columns)
            whole = ops.reshape(decoded, (-1,)) if rotation is None else ops.unrotate(decoded, rotation)
            return whole[: bucket.numel]

        error = ops.subtract(x, decode(mine)) if return_error else None
        return Exchange(decode(total), Counted(state.step + 1), error)

    def _range(self, ops: Ops, rows: Array) -> Array:
        """Return this rank's range of each block."""
        if not self.clip or self.rotation == "none":
            return ops.absmax(rows)
        return ops.norms(rows) * (NormalDist().inv_cdf(1 - self.clip / 2) / int(rows.shape[1]) ** 0.5)

    def round(self, ops: Ops, rows: Array, limits: Array, seed: Any) -> Array:
        """Round stochastically to integers in ``-top .. top``, with ``top`` at the limits."""
        shape = (int(rows.shape[0]), int(rows.shape[1]))
        u = ops.cast(ops.reshape(ops.uniform(seed, shape[0] * shape[1]), shape), ops.dtype(rows))
        x = rows / ops.reshape(ops.where(limits > 0, limits, 1.0), (-1, 1))
        if self.levels == "uniform":
            return ops.clip(ops.floor(x * self.top + u), -self.top, self.top)
        table = np.array(TABLES[self.bits], np.float64) - self.top
        x = ops.clip(x * self.top, -self.top, self.top)
        index = ops.reshape(sum(ops.cast(x >= level, "int64") for level in table[1:-1]), (-1,))
        levels = ops.constant(table.astype(ops.dtype(x)))
        low = ops.reshape(ops.take(levels, index), shape)
        step = ops.reshape(ops.take(levels, index + 1), shape) - low
        return ops.where(u * step < x - low, low + step, low)
