"""Byte layout of packed codes.

A byte holds ``lanes = 8 / bits`` codes of 1, 2, 4 or 8 bits. n codes are split into groups of `GROUP`; the last group
is padded with zeros to a multiple of ``lanes``. A group is split into ``lanes`` runs, and byte j of it holds element j
of each run, the first run in the lowest bits. So loops over the bytes can use vector instructions and stay in the
cache. Other widths are sums of these: 3 bits are a plane of 2-bit codes (the low bits of all n) followed by a plane of
1-bit codes.
"""

from __future__ import annotations

from hvd_compress.ops import Ops
from hvd_compress.ops.arrays import Array

GROUP = 512
"""Codes per group."""

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
"""Widths of the planes of each width, low bits first."""


def packed_size(n: int, bits: int) -> int:
    """Return the bytes of ``n`` packed codes."""
    return sum(-(-n * part // 8) for part in PLANES[bits])


def pack(ops: Ops, codes: Array, bits: int) -> Array:
    """Pack codes.

    Args:
        ops: Primitives of the framework.
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
    """Undo `pack`: return the ``n`` codes, uint8."""
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
    """Split an array into whole groups and the rest, each if any, and return them with the lengths of their runs.

    Args:
        ops: Primitives of the framework.
        x: Codes or bytes.
        n: Number of codes.
        lanes: Codes per byte.
        size: Elements of ``x`` per group.
    """
    whole, rest = n // GROUP * size, -(-(n % GROUP) // lanes)
    parts = [(x[:whole], GROUP // lanes)] if whole else []
    return [*parts, (x[whole:], rest)] if rest else parts
