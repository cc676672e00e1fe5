"""Pack small integers into lanes of an int32, so that any allreduce can sum them.

Horovod does not sum int8 in all its backends, and no narrower integers at all. So ``32 / width`` signed integers are
the digits of ``v = sum_l y_l 2^(width l)``. If the sum of each lane over the ranks stays within
``+-(2^(width-1) - 1)``, the sum of the v cannot overflow, as
``|sum_i v_i| <= (2^(width-1) - 1) (2^32 - 1) / (2^width - 1) < 2^31``, and balanced digits are unique.
"""

from __future__ import annotations

from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array


def width_of(largest: int) -> int:
    """Return the bits of the narrowest lane for sums within ``+-largest``."""
    return largest.bit_length() + 1


def lanes_of(width: int) -> int:
    """Return the number of lanes of this width in an int32."""
    return 32 // width


def pack_lanes(ops: Ops, y: Array, width: int) -> Array:
    """Pack integers; lane l of element i holds integer ``i + l n / lanes``.

    Args:
        ops: Primitives of the framework.
        y: int32, any shape; padded with zeros to a multiple of the lanes.
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
    """Undo `pack_lanes`, also for a sum: return the first ``n`` balanced digits, lowest lane first."""
    base, lanes = 2**width, []
    for _ in range(lanes_of(width)):
        lane = (packed + base // 2) % base - base // 2
        lanes.append(lane)
        packed = (packed - lane) // base
    return ops.concat(lanes)[:n]
