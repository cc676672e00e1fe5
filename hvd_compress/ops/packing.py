"""How small codes lie in bytes: written down here and nowhere else.

Widths of 1, 2, 4 and 8 bits divide a byte: it holds ``lanes = 8 / bits`` codes. n codes are cut into groups of `GROUP`,
the last of which is filled up with zeros to a multiple of ``lanes``. A group is cut into ``lanes`` runs, and byte j of
it holds element j of every run, the first run in the lowest bits. A loop over the bytes then reads and writes whole
vectors, and never leaves the cache. Other widths are sums of these: 3 bits are a plane of 2-bit codes (the low bits of
all n) followed by a plane of 1-bit codes.
"""

from __future__ import annotations

from hvd_compress.core.collectives import Array
from hvd_compress.ops import Ops

GROUP = 512
"""Codes that are packed together."""

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
"""Each width as widths that divide 8, low bits first."""


def packed_size(n: int, bits: int) -> int:
    """How many bytes ``n`` codes of ``bits`` bits take."""
    return sum(-(-n * part // 8) for part in PLANES[bits])


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
    for part in PLANES[bits]:
        planes.append(_pack_plane(ops, codes % 2**part if part < bits else codes, part))
        bits -= part
        codes = codes // 2**part if bits else codes
    return ops.concat(planes) if len(planes) > 1 else planes[0]


def unpack(ops: Ops, data: Array, bits: int, n: int) -> Array:
    """Undo `pack`: the ``n`` codes, uint8."""
    parts = PLANES[bits]
    planes = ops.from_bytes(data, *(("uint8", packed_size(n, part)) for part in parts))
    codes, shift = None, 0
    for plane, part in zip(planes, parts, strict=True):
        lane = _unpack_plane(ops, plane, part, n) * 2**shift
        codes = lane if codes is None else codes + lane
        shift += part
    return codes


def _pack_plane(ops: Ops, codes: Array, bits: int) -> Array:
    lanes = 8 // bits
    if lanes == 1 or not int(codes.shape[0]):
        return codes
    packed = []
    for part, run in _groups(ops, codes, int(codes.shape[0]), lanes, GROUP):
        runs = ops.reshape(ops.pad(part, -(-int(part.shape[0]) // (lanes * run)) * lanes * run), (-1, lanes, run))
        merged = runs[:, 0]
        for lane in range(1, lanes):
            merged = merged + runs[:, lane] * 2 ** (bits * lane)
        packed.append(ops.reshape(merged, (-1,)))
    return ops.concat(packed)


def _unpack_plane(ops: Ops, data: Array, bits: int, n: int) -> Array:
    lanes = 8 // bits
    if lanes == 1 or not n:
        return data
    codes = []
    for part, run in _groups(ops, data, n, lanes, GROUP // lanes):
        rows = ops.reshape(part, (-1, run))
        runs = [rows // 2**shift % 2**bits for shift in range(0, 8, bits)]
        codes.append(ops.reshape(ops.stack(runs), (-1,)))
    return ops.concat(codes)[:n]


def _groups(ops: Ops, x: Array, n: int, lanes: int, size: int) -> list[tuple[Array, int]]:
    """The part of an array that is made of whole groups, and the rest, if there are any, with the length of a run.

    Args:
        ops: The primitives of the framework at work.
        x: Codes or bytes.
        n: Number of codes.
        lanes: Codes in a byte.
        size: Elements of ``x`` in a group.
    """
    whole, rest = n // GROUP * size, -(-(n % GROUP) // lanes)
    parts = [(x[:whole], GROUP // lanes)] if whole else []
    return [*parts, (x[whole:], rest)] if rest else parts
