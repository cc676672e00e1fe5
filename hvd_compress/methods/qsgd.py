"""QSGD and TernGrad: stochastic rounding to a few levels, with the scales of each rank and block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_compress.collectives import Array
from hvd_compress.methods.base import check_range
from hvd_compress.methods.quantised import Blocks, Quantised
from hvd_compress.ops import Ops
from hvd_compress.packing import pack, packed_size, unpack


@dataclass(frozen=True, kw_only=True)
class _Levels(Quantised):
    """Codes ``-s .. s`` for multiples of ``scale / s``, one scale for each block."""

    keeps = "step count"

    block: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("block", self.block, "at least 1", self.block >= 1)
        check_range("seed", self.seed, "in 0 .. 2**32-1", 0 <= self.seed < 2**32)

    @property
    def _bits(self) -> int:
        raise NotImplementedError

    @property
    def _levels(self) -> int:
        """s: levels on each side of zero."""
        return int(2 ** (self._bits - 1) - 1)

    def _scaled(self, ops: Ops, rows: Array, blocks: Blocks) -> tuple[Array, Array]:
        """The rows as they are to be rounded, and the scale of each, no smaller than the largest magnitude in it."""
        raise NotImplementedError

    def encode(self, ops: Ops, x: Array, seed: Any) -> Array:
        blocks = Blocks.of(int(x.shape[0]), self.block)
        rows, scales = self._scaled(ops, blocks.cut(ops, x), blocks)
        unit = blocks.column(ops, ops.where(scales > 0, scales, 1.0))
        noise = ops.reshape(ops.uniform(seed, blocks.number * blocks.size), (blocks.number, blocks.size))
        y = ops.floor(rows / unit * self._levels + ops.cast(noise, ops.dtype(x)))
        y = blocks.join(ops, ops.clip(y, -self._levels, self._levels) + self._levels)
        return ops.to_bytes(scales, pack(ops, ops.cast(y, "uint8"), self._bits))

    def decode(self, ops: Ops, data: Array, n: int, dtype: str) -> Array:
        blocks = Blocks.of(n, self.block)
        scales, codes = ops.from_bytes(data, (dtype, blocks.number), ("uint8", packed_size(n, self._bits)))
        y = ops.cast(unpack(ops, codes, self._bits, n), dtype) - self._levels
        return blocks.join(ops, blocks.cut(ops, y) * blocks.column(ops, scales / self._levels))


@dataclass(frozen=True, kw_only=True)
class QSGD(_Levels):
    """Quantised SGD: unbiased rounding to s levels of the norm of each block (section 3.1 of the paper).

    With ``r = s |x_j| / ||x||`` and u uniform in [0, 1)::

        Q(x_j) = ||x|| sgn(x_j) floor(r + u) / s,        s = 2^(bits-1) - 1,        E[Q(x)] = x

    With the L2 norm the variance is at most ``min(d/s^2, sqrt(d)/s) ||x||^2`` for blocks of d; the maximum is always
    more accurate, the L2 norm sends more zeros. The paper then codes the integers by Elias' code; here each takes
    ``bits`` bits, so that all ranks send equally much.

    Args:
        bits: Width of a code, 2 to 8.
        norm: ``"max"`` or ``"l2"``. With the L2 norm rounding may add more than there was, so that error feedback would
            diverge and is refused.
        block: Coordinates that share a norm.
        seed: Start of the random sequence.
        twoway: Compress what comes back, too.
    """

    name = "qsgd"
    paper = "Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, 2017"
    unbiasedness = "yes"

    bits: int = 4
    norm: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("bits", self.bits, "2 to 8", 2 <= self.bits <= 8)
        check_range("norm", self.norm, "'max' or 'l2'", self.norm in ("max", "l2"))

    @property
    def can_retain(self) -> bool:
        return self.norm == "max"

    @property
    def _bits(self) -> int:
        return self.bits

    def _scaled(self, ops: Ops, rows: Array, blocks: Blocks) -> tuple[Array, Array]:
        peaks = ops.absmax(rows)
        if self.norm == "max":
            return rows, peaks
        inside = rows / blocks.column(ops, ops.where(peaks > 0, peaks, 1.0))  # their squares stay in range
        return rows, peaks * ops.sqrt(ops.sum(inside * inside))


@dataclass(frozen=True, kw_only=True)
class TernGrad(_Levels):
    """Ternary gradients: clipped, then rounded to -1, 0 or 1 times the largest magnitude (section 3 of the paper).

    With sigma the standard deviation of a block, about zero::

        x = clip(x, -c sigma, c sigma)        s = max |x|        t_j = s sgn(x_j) [u < |x_j| / s]

    Clipping makes s small and the rounding precise, at the price of a bias; with ``clip=0``, E[t] = x. The paper takes
    one scale for each layer; here it is one for each block.

    Args:
        clip: c, in standard deviations; 0 for no clipping.
        block: Coordinates that share a scale.
        seed: Start of the random sequence.
        twoway: Compress what comes back, too.
    """

    name = "terngrad"
    paper = "Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning, 2017"
    unbiasedness = "with clip=0"

    clip: float = 2.5
    block: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("clip", self.clip, "at least 0", self.clip >= 0)

    @property
    def _bits(self) -> int:
        return 2

    def _scaled(self, ops: Ops, rows: Array, blocks: Blocks) -> tuple[Array, Array]:
        peaks = ops.absmax(rows)
        if not self.clip:
            return rows, peaks
        inside = rows / blocks.column(ops, ops.where(peaks > 0, peaks, 1.0))
        sigma = peaks * ops.sqrt(ops.sum(inside * inside) / blocks.members(ops, ops.dtype(rows)))
        limit = blocks.column(ops, self.clip * sigma)
        rows = ops.where(rows > limit, limit, ops.where(rows < -limit, -limit, rows))
        return rows, ops.absmax(rows)
