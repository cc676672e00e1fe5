"""Reference implementation of the code of the largest coordinates; see `hvd_compress.ops.code.Record`."""

from __future__ import annotations

import numpy as np

from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array
from hvd_compress.ops.blocks import Blocks
from hvd_compress.ops.code import Code, Record

LARGEST_BFLOAT16 = (2 - 2**-7) * 2.0**127


def layout_of(code: Code, n: int) -> tuple[Blocks, Record]:
    """Return the blocks of ``n`` coordinates, and the layout of each."""
    blocks = Blocks.of(n, code.block)
    return blocks, Record.of(blocks.size, code.ratio)


def encode_top(ops: Ops, x: Array, code: Code) -> Array:
    """Encode an array of shape ``(n,)``."""
    blocks, record = layout_of(code, int(x.shape[0]))
    if not blocks.number:
        return ops.zeros((0,), "uint8")
    rows = blocks.cut(ops, x)
    indices = ops.top_indices(rows, record.kept)
    places = ops.reshape(indices + _rows(ops, blocks, blocks.size), (-1,))
    values = ops.reshape(ops.take(ops.reshape(rows, (-1,)), places), (blocks.number, record.kept))
    large, scales = _magnitudes(ops, ops.cast(ops.abs(values), "float64"), blocks)
    codes = ops.cast(values < 0, "int64") + 2 * ops.cast(large, "int64") + 4 * (indices % 2**record.low)

    bits = ops.zeros((blocks.number * 8 * record.size,), "uint8")
    starts, order = _rows(ops, blocks, 8 * record.size), _order(ops, record)
    bits = ops.put(bits, ops.reshape(starts + indices // 2**record.low + order, (-1,)), 1)
    for bit in range(record.low + 2):
        places = starts + record.highs + order * (record.low + 2) + bit
        bits = ops.put(bits, ops.reshape(places, (-1,)), ops.cast(ops.reshape(codes // 2**bit % 2, (-1,)), "uint8"))
    octets = ops.sum(ops.cast(ops.reshape(bits, (-1, 8)), "int64") * _powers(ops, 8))
    return ops.to_bytes(scales, ops.cast(octets, "uint8"))


def decode_top(ops: Ops, data: Array, code: Code, n: int, dtype: str) -> Array:
    """Undo `encode_top`. Any bytes of the right length stand for some numbers."""
    blocks, record = layout_of(code, n)
    if not blocks.number:
        return ops.zeros((0,), dtype)
    scales, octets = ops.from_bytes(data, ("uint16", 2 * blocks.number), ("uint8", blocks.number * record.size))
    octets = ops.reshape(ops.cast(octets, "int64"), (-1, 1))
    bits = ops.reshape(octets // _powers(ops, 8) % 2, (blocks.number, 8 * record.size))
    order = _order(ops, record)
    highs = ops.top_indices(ops.cast(bits[:, : record.highs], "float32"), record.kept) - order
    codes = ops.reshape(bits[:, record.highs : record.bits], (-1, record.low + 2))
    codes = ops.reshape(ops.sum(codes * _powers(ops, record.low + 2)), (blocks.number, record.kept))
    indices = ops.clip(highs * 2**record.low + codes // 4, 0, blocks.size - 1)

    above, below = ops.split(ops.cast(ops.from_bfloat16(scales), dtype), [blocks.number, blocks.number])
    values = ops.where(codes // 2 % 2 > 0, blocks.column(ops, above), blocks.column(ops, below))
    values = ops.where(codes % 2 > 0, -values, values)
    places = ops.reshape(indices + _rows(ops, blocks, blocks.size), (-1,))
    return ops.put(ops.zeros((blocks.number * blocks.size,), dtype), places, ops.reshape(values, (-1,)))[:n]


def _magnitudes(ops: Ops, sizes: Array, blocks: Blocks) -> tuple[Array, Array]:
    """Return which magnitudes of a block are above their mean, and the means of these and of the others: uint16."""
    kept = int(sizes.shape[1])
    large = sizes > blocks.column(ops, ops.sum(sizes) / kept)
    share = ops.cast(large, "float64")
    number = ops.sum(share)
    above = ops.sum(sizes * share) / ops.where(number > 0, number, 1.0)
    below = ops.sum(sizes * (1 - share)) / ops.where(number < kept, kept - number, 1.0)
    means = ops.clip(ops.concat([above, below]), 0.0, LARGEST_BFLOAT16)
    return large, ops.to_bfloat16(ops.cast(means, "float32"))


def _rows(ops: Ops, blocks: Blocks, width: int) -> Array:
    """Return where each block begins, as a column."""
    return ops.reshape(ops.arange(blocks.number) * width, (-1, 1))


def _order(ops: Ops, record: Record) -> Array:
    return ops.reshape(ops.arange(record.kept), (1, -1))


def _powers(ops: Ops, bits: int) -> Array:
    return ops.constant(2 ** np.arange(bits, dtype=np.int64))
