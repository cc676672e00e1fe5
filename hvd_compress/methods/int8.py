"""Int8: stochastic rounding to a shared scale, summed as integers."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import AllReduce, Exchange, Exchanging, ReduceScatter, World
from hvd_compress.core.method import LARGEST_BLOCK, Card, Counted, Example, Method, check_range, register, rows_of
from hvd_compress.errors import UnsupportedError
from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array


@register
@dataclass(frozen=True)
class Int8(Method):
    """Linear quantisation with a scale that all ranks share, so that an allreduce can sum the integers.

    For each block, with m the largest magnitude over all ranks, and u uniform in [0, 1)::

        m = max_i max_j |g_i[j]|                    (allreduce MAX)
        y_i = floor(L g_i / m + u_i),  |y_i| <= L = floor((2^(bits-1) - 1) / n)
        total = (m / L) sum_i y_i                   (allreduce SUM)

    Stochastic rounding makes it unbiased. The integers are packed into lanes of an int32; see `hvd_compress.ops.lanes`.

    Args:
        bits: Bits per lane: 8 for up to 127 ranks, or 16 for up to 32767.
        block: Coordinates that share one scale; a multiple of 4.
        seed: Random seed.
    """

    name = "int8"
    family = "quantised"
    card = Card(
        paper="Xin et al., Global-QSGD: Allreduce-Compatible Quantization for Distributed Learning, 2023",
        collective="2 allreduces (max, sum)",
        keeps="step count",
        unbiased="yes",
        examples=(
            Example("int8:block=64", 16 * (4 + 64), unbiased=True),
            Example("int8:block=64,bits=16", 16 * (4 + 128), unbiased=True),
        ),
        compared=("int8:bits=16", "int8"),
    )
    retains = True

    bits: int = 8
    block: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("bits", self.bits, "8 or 16", self.bits in (8, 16))
        check_range(
            "block",
            self.block,
            f"a multiple of 4 in 4 .. {LARGEST_BLOCK}",
            4 <= self.block <= LARGEST_BLOCK and self.block % 4 == 0,
        )
        check_range("seed", self.seed, "in 0 .. 2**32-1", 0 <= self.seed < 2**32)

    def init(self, ops: Ops, bucket: Bucket, world: World) -> Counted:
        return Counted(step=0)

    def levels(self, ranks: int) -> int:
        """Return the number of levels on each side of zero with which the sum over the ranks fits its lane.

        Raises:
            UnsupportedError: If there are too many ranks for ``bits``.
        """
        levels: int = (2 ** (self.bits - 1) - 1) // ranks
        if levels < 1:
            cure = "take int8:bits=16" if self.bits == 8 else "take another method, such as qsgd"
            raise UnsupportedError(f"int8:bits={self.bits} cannot sum over {ranks} ranks: {cure}")
        return levels

    def exchange(
        self, ops: Ops, bucket: Bucket, x: Array, state: Counted, world: World, return_error: bool = False
    ) -> Exchanging:
        levels, rows = self.levels(world.size), rows_of(ops, x, self.block)
        peak = yield AllReduce(ops.absmax(rows), op="max")
        seed = ops.seed(self.seed, bucket.seed, state.step, world.rank)
        sent = ops.to_lanes(rows, peak, levels, self.bits, seed)
        summed = yield AllReduce(sent)

        def decode(lanes: Array) -> Array:
            values = ops.from_lanes(lanes, peak, levels, self.bits, int(rows.shape[0]), self.block)
            return ops.reshape(values, (-1,))[: bucket.numel]

        error = ops.subtract(x, decode(sent)) if return_error else None
        return Exchange(decode(summed), Counted(state.step + 1), error)

    def reduce_scatter(
        self, ops: Ops, bucket: Bucket, x: Array, state: Counted, world: World, return_error: bool = False
    ) -> Exchanging:
        levels, part = self.levels(world.size), bucket.numel // world.size
        parts = [rows_of(ops, one, self.block) for one in ops.split(x, [part] * world.size)]
        count = int(parts[0].shape[0])
        peak = yield AllReduce(ops.absmax(ops.concat(parts)), op="max")
        peaks = ops.split(peak, [count] * world.size)
        seeds = [ops.seed(self.seed, bucket.seed, state.step, world.rank, place) for place in range(world.size)]
        sent = [
            ops.to_lanes(rows, peak, levels, self.bits, seed)
            for rows, peak, seed in zip(parts, peaks, seeds, strict=True)
        ]
        summed = yield ReduceScatter(ops.reshape(ops.concat(sent), (world.size, -1)))

        def decode(lanes: Array, place: int) -> Array:
            values = ops.from_lanes(lanes, peaks[place], levels, self.bits, count, self.block)
            return ops.reshape(values, (-1,))[:part]

        error = None
        if return_error:
            error = ops.subtract(x, ops.concat([decode(lanes, place) for place, lanes in enumerate(sent)]))
        return Exchange(decode(summed, world.rank), Counted(state.step + 1), error)
