"""Integers that are summed by any allreduce: several lanes in one int32.

Horovod sums no int8 on all its paths, and no narrower integers at all. So ``32 / width`` signed integers travel as the
digits of ``v = sum_l y_l 2^(width l)``. If every lane's sum over the ranks stays within ``+-(2^(width-1) - 1)``, the
sum of the v cannot wrap, ``|sum_i v_i| <= (2^(width-1) - 1) (2^32 - 1) / (2^width - 1) < 2^31``, and balanced digits
are unique.
"""

from __future__ import annotations

from hvd_compress.core.collectives import Array
from hvd_compress.ops import Ops


def width_of(largest: int) -> int:
    """The narrowest lane for sums within ``+-largest``."""
    return largest.bit_length() + 1


def lanes_of(width: int) -> int:
    """How many lanes of this width an int32 has."""
    return 32 // width


def pack_lanes(ops: Ops, y: Array, width: int) -> Array:
    """Put element i and the elements a whole number of ``n / lanes`` further on into one int32.

    Args:
        ops: The primitives of the framework at work.
        y: int32, any shape; filled up with zeros to a multiple of the lanes.
        width: Bits of a lane.
    """
    y = ops.reshape(y, (-1,))
    n, count = int(y.shape[0]), lanes_of(width)
    lanes = ops.reshape(ops.pad(y, -(-n // count) * count), (count, -1))
    packed = lanes[0]
    for lane in range(1, count):
        packed = packed + lanes[lane] * 2 ** (width * lane)
    return packed


def unpack_lanes(ops: Ops, packed: Array, width: int, n: int) -> Array:
    """Undo `pack_lanes`, also of a sum: balanced digits, lowest first; the first ``n``."""
    base, lanes = 2**width, []
    for _ in range(lanes_of(width)):
        lane = (packed + base // 2) % base - base // 2
        lanes.append(lane)
        packed = (packed - lane) // base
    return ops.concat(lanes)[:n]
