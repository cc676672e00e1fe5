"""One bit per coordinate, with error feedback: 1-bit SGD and EF-SignSGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_compress.collectives import Array
from hvd_compress.methods.base import check_range
from hvd_compress.methods.quantised import Blocks, Quantised
from hvd_compress.ops import Ops
from hvd_compress.packing import pack, packed_size, unpack


@dataclass(frozen=True, kw_only=True)
class _OneBit(Quantised):
    """One bit for each coordinate, and what each block of coordinates shares."""

    feedback = True
    serves_feedback = True

    block: int = 8192

    def __post_init__(self) -> None:
        check_range("block", self.block, "at least 1", self.block >= 1)


@dataclass(frozen=True, kw_only=True)
class OneBit(_OneBit):
    """1-bit SGD: each coordinate becomes the mean of those of its sign.

    With p_i the gradient of rank i plus its residual, in each block of coordinates::

        a = mean of p_i[j] >= 0        b = mean of p_i[j] < 0        C(p_i)[j] = a if p_i[j] >= 0 else b

    Nothing reconstructs p_i better from one bit per coordinate with this threshold. The paper takes two means for each
    column of a weight matrix; here it is two for each block.

    Args:
        block: Coordinates that share two means.
        twoway: Compress what comes back, too, with error feedback on the servers.
    """

    name = "onebit"
    paper = "Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Training, 2014"

    def encode(self, ops: Ops, x: Array, seed: Any) -> Array:
        blocks, dtype = Blocks.of(int(x.shape[0]), self.block), ops.dtype(x)
        rows, members = blocks.cut(ops, x), blocks.members(ops, dtype)
        up = ops.cast(rows >= 0, dtype)
        ups = ops.sum(up) - (blocks.size - members)  # without those that fill up the last block
        downs = members - ups
        ups, downs = ops.where(ups > 0, ups, 1.0), ops.where(downs > 0, downs, 1.0)
        above = ops.sum(rows * up / blocks.column(ops, ups))
        below = ops.sum(rows * (1 - up) / blocks.column(ops, downs))
        return ops.to_bytes(above, below, pack(ops, ops.cast(x >= 0, "uint8"), 1))

    def decode(self, ops: Ops, data: Array, n: int, dtype: str) -> Array:
        blocks = Blocks.of(n, self.block)
        above, below, bits = ops.from_bytes(
            data, (dtype, blocks.number), (dtype, blocks.number), ("uint8", packed_size(n, 1))
        )
        up = blocks.cut(ops, unpack(ops, bits, 1, n)) > 0
        return blocks.join(ops, ops.where(up, blocks.column(ops, above), blocks.column(ops, below)))


@dataclass(frozen=True, kw_only=True)
class EFSignSGD(_OneBit):
    """EF-SignSGD: the sign, times the mean magnitude of the block (Algorithm 1 of the paper).

    With p_i the gradient of rank i plus its residual, in each block of d coordinates::

        C(p_i) = (||p_i||_1 / d) sgn(p_i)                e_i = p_i - C(p_i)

    The paper's p_i contains the learning rate; here it stays with the optimizer, so a falling rate applies to what is
    left in the residual as well. The sign of 0 is 1.

    Args:
        block: Coordinates that share a scale.
        twoway: Compress what comes back, too, with error feedback on the servers.
    """

    name = "efsignsgd"
    paper = "Karimireddy et al., Error Feedback Fixes SignSGD and Other Gradient Compression Schemes, 2019"

    def encode(self, ops: Ops, x: Array, seed: Any) -> Array:
        blocks = Blocks.of(int(x.shape[0]), self.block)
        members = blocks.column(ops, blocks.members(ops, ops.dtype(x)))
        scales = ops.sum(ops.abs(blocks.cut(ops, x)) / members)
        return ops.to_bytes(scales, pack(ops, ops.cast(x >= 0, "uint8"), 1))

    def decode(self, ops: Ops, data: Array, n: int, dtype: str) -> Array:
        blocks = Blocks.of(n, self.block)
        scales, bits = ops.from_bytes(data, (dtype, blocks.number), ("uint8", packed_size(n, 1)))
        signs = ops.cast(unpack(ops, bits, 1, n), dtype) * 2 - 1
        return blocks.join(ops, blocks.cut(ops, signs) * blocks.column(ops, scales))
