"""LoCo: 4-bit gradients with an error memory of 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hvd_compress.bucket import Bucket
from hvd_compress.collectives import Array, Exchange, Exchanging, World
from hvd_compress.methods.base import Method, check_range
from hvd_compress.methods.quantised import Blocks, part_size, two_step
from hvd_compress.ops import Ops
from hvd_compress.packing import pack, packed_size, unpack
from hvd_compress.roles import Private


class Errors(NamedTuple):
    """An error memory in 8 bits.

    Attributes:
        codes: int8, shape ``(n,)``.
        scales: What the code 127 stands for, one for each block.
    """

    codes: Private
    scales: Private


class LoCoState(NamedTuple):
    """What LoCo keeps.

    Attributes:
        step: How many exchanges there were.
        sent: Errors of what this rank sends, of the size of the bucket.
        served: Errors of its answers as the server of its part.
    """

    step: int | Array
    sent: Errors
    served: Errors


@dataclass(frozen=True)
class LoCo(Method):
    """Low-bit communication with a running mean of the error (Algorithm 1 of the paper, for allreduce).

    With Q rounding to the nearest of ``2 L + 1`` levels of the largest magnitude of a block, L = 2^(bits-1) - 1::

        h_i = g_i + e_i            send Q(h_i)            e_i = b e_i + (1 - b) (h_i - Q(h_i))

    e_i is kept in 8 bits, a fourth of a residual, and forgotten every ``reset`` steps. Each rank sums one part of the
    bucket (alltoall) and sends the sum back in the same way, with an error memory of its own (allgather), as DeepSpeed
    does between nodes.

    Args:
        bits: Width of a code, 2 to 8.
        beta: b, in [0, 1).
        reset: Steps after which the errors are forgotten; 0 for never.
        block: Coordinates that share a scale.
    """

    name = "loco"
    paper = "Xie et al., LoCo: Low-Bit Communication Adaptor for Large-scale Model Training, 2024"
    collective = "alltoall + allgather"
    keeps = "errors in 8 bits"

    bits: int = 4
    beta: float = 0.8
    reset: int = 1024
    block: int = 512

    def __post_init__(self) -> None:
        check_range("bits", self.bits, "2 to 8", 2 <= self.bits <= 8)
        check_range("beta", self.beta, "in [0, 1)", 0 <= self.beta < 1)
        check_range("reset", self.reset, "at least 0", self.reset >= 0)
        check_range("block", self.block, "at least 1", self.block >= 1)

    def init(self, ops: Ops, bucket: Bucket, size: int) -> LoCoState:
        def nothing(n: int) -> Errors:
            return Errors(ops.zeros((n,), "int8"), ops.zeros((Blocks.of(n, self.block).number,), bucket.dtype))

        return LoCoState(0, nothing(bucket.numel), nothing(part_size(bucket, size)))

    def exchange(self, ops: Ops, bucket: Bucket, x: Array, state: LoCoState, world: World) -> Exchanging:
        part, served = part_size(bucket, world.size), state.served

        def serve(received: list[Array]) -> Array:
            nonlocal served
            before = self._read_errors(ops, served, bucket.dtype)
            total = sum(received[1:], received[0]) + before
            answer = self._encode(ops, total)
            served = self._write_errors(ops, before, total - self._decode(ops, answer, part, bucket.dtype), state.step)
            return answer

        before = self._read_errors(ops, state.sent, bucket.dtype)
        h = x + before
        total, decoded = yield from two_step(
            ops,
            bucket,
            h,
            world,
            encode=lambda row, _: self._encode(ops, row),
            decode=lambda data: self._decode(ops, data, part, bucket.dtype),
            serve=serve,
        )
        sent = self._write_errors(ops, before, h - decoded, state.step)
        return Exchange(total, None, LoCoState(state.step + 1, sent, served))

    def _encode(self, ops: Ops, x: Array) -> Array:
        codes, scales = _round(ops, x, self.block, 2 ** (self.bits - 1) - 1)
        return ops.to_bytes(scales, pack(ops, ops.cast(codes + 2 ** (self.bits - 1), "uint8"), self.bits))

    def _decode(self, ops: Ops, data: Array, n: int, dtype: str) -> Array:
        count = Blocks.of(n, self.block).number
        scales, packed = ops.from_bytes(data, (dtype, count), ("uint8", packed_size(n, self.bits)))
        codes = ops.cast(unpack(ops, packed, self.bits, n), dtype) - 2 ** (self.bits - 1)
        return _unround(ops, codes, scales, self.block, 2 ** (self.bits - 1) - 1)

    def _read_errors(self, ops: Ops, errors: Errors, dtype: str) -> Array:
        return _unround(ops, ops.cast(errors.codes, dtype), errors.scales, self.block, 127)

    def _write_errors(self, ops: Ops, before: Array, error: Array, step: int | Array) -> Errors:
        running = before * self.beta + error * (1 - self.beta)
        mean = running
        if self.reset:
            due = (step + 1) % self.reset == 0
            mean = ops.choose(due, lambda: ops.zeros(tuple(before.shape), ops.dtype(before)), lambda: running)
        codes, scales = _round(ops, mean, self.block, 127)
        return Errors(ops.cast(codes, "int8"), scales)


def _round(ops: Ops, x: Array, block: int, levels: int) -> tuple[Array, Array]:
    """Round to the nearest of the levels of each block: whole numbers in ``-levels .. levels``, and the scales."""
    blocks = Blocks.of(int(x.shape[0]), block)
    rows = blocks.cut(ops, x)
    scales = ops.absmax(rows)
    unit = blocks.column(ops, ops.where(scales > 0, scales, 1.0))
    return blocks.join(ops, ops.clip(ops.floor(rows / unit * levels + 0.5), -levels, levels)), scales


def _unround(ops: Ops, codes: Array, scales: Array, block: int, levels: int) -> Array:
    blocks = Blocks.of(int(codes.shape[0]), block)
    return blocks.join(ops, blocks.cut(ops, codes) * blocks.column(ops, scales / levels))
