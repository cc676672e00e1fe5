"""How small codes lie in bytes: written down here and nowhere else.

Widths of 1, 2, 4 and 8 bits divide a byte. With ``lanes = 8 / bits`` codes to a byte, n codes (padded with zeros to a
multiple of ``lanes``) are cut into ``lanes`` runs, and byte j holds element j of every run, the first run in the lowest
bits. A loop over the bytes then reads and writes whole vectors. Other widths are sums of these: 3 bits are a run of
2-bit codes (the low bits) followed by a run of 1-bit codes.
"""

from __future__ import annotations

from hvd_compress.collectives import Array
from hvd_compress.ops import Ops

_PARTS = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
"""Each width as widths that divide 8, low bits first."""


def packed_size(n: int, bits: int) -> int:
    """How many bytes ``n`` codes of ``bits`` bits take."""
    return sum(-(-n * part // 8) for part in _PARTS[bits])


def pack(ops: Ops, codes: Array, bits: int) -> Array:
    """Pack codes.

    Args:
        ops: The primitives of the framework at work.
        codes: uint8, shape ``(n,)``, each below ``2**bits``.
        bits: 1 to 8.

    Returns:
        uint8, shape ``(packed_size(n, bits),)``.
    """
    planes = []
    for part in _PARTS[bits]:
        planes.append(_pack_plane(ops, codes % 2**part if part < bits else codes, part))
        bits -= part
        codes = codes // 2**part if bits else codes
    return ops.concat(planes) if len(planes) > 1 else planes[0]


def unpack(ops: Ops, data: Array, bits: int, n: int) -> Array:
    """Undo `pack`: the ``n`` codes, uint8."""
    parts = _PARTS[bits]
    planes = ops.from_bytes(data, *(("uint8", packed_size(n, part)) for part in parts))
    codes, shift = None, 0
    for plane, part in zip(planes, parts, strict=True):
        lane = _unpack_plane(ops, plane, part)[:n] * 2**shift
        codes = lane if codes is None else codes + lane
        shift += part
    return codes


def _pack_plane(ops: Ops, codes: Array, bits: int) -> Array:
    lanes = 8 // bits
    n = int(codes.shape[0])
    if lanes == 1:
        return codes
    runs = ops.reshape(ops.pad(codes, -(-n // lanes) * lanes), (lanes, -1))
    packed = runs[0]
    for lane in range(1, lanes):
        packed = packed + runs[lane] * 2 ** (bits * lane)
    return packed


def _unpack_plane(ops: Ops, data: Array, bits: int) -> Array:
    if bits == 8:
        return data
    return ops.concat([data // 2**shift % 2**bits for shift in range(0, 8, bits)])
