"""Codes of 1 to 8 bits in bytes, as `hvd_compress.ops.packing` lays them out, a group at a time.

Whole groups are handled eight codes at once, as the bytes of a uint64: none gets into its neighbours' way, as long as
it is masked before it is shifted up, and after it is shifted down.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_compress.ops.kernels.cpu.compiled import part
from hvd_compress.ops.packing import GROUP

WORDS = GROUP // 8
"""Words with the codes of a group."""

_ONE, _TWO, _FOUR = (np.uint64(0x0101010101010101 * mask) for mask in (1, 3, 15))


@part
def _pack(words: Any, width: Any, shift: Any, buffer: Any, packed: Any, out: Any) -> None:
    """Pack the bits from ``shift`` on of a whole group; ``packed`` are the bytes of the buffer."""
    if width == 8:
        for j in range(WORDS):
            buffer[j] = words[j]
        for j in range(GROUP):
            out[j] = packed[j]
    elif width == 4:
        for j in range(WORDS // 2):
            low, high = words[j] >> shift & _FOUR, words[j + WORDS // 2] >> shift & _FOUR
            buffer[j] = low | high << np.uint64(4)
        for j in range(GROUP // 2):
            out[j] = packed[j]
    elif width == 2:
        for j in range(WORDS // 4):
            a, b = words[j] >> shift & _TWO, words[j + WORDS // 4] >> shift & _TWO
            c, d = words[j + WORDS // 2] >> shift & _TWO, words[j + 3 * WORDS // 4] >> shift & _TWO
            buffer[j] = (a | b << np.uint64(2)) | (c | d << np.uint64(2)) << np.uint64(4)
        for j in range(GROUP // 4):
            out[j] = packed[j]
    else:
        for j in range(WORDS // 8):
            byte = words[j] >> shift & _ONE
            for lane in range(1, 8):
                byte |= (words[j + lane * (WORDS // 8)] >> shift & _ONE) << np.uint64(lane)
            buffer[j] = byte
        for j in range(GROUP // 8):
            out[j] = packed[j]


@part
def _unpack(data: Any, width: Any, shift: Any, words: Any) -> None:
    """Undo `_pack`, and add the bits to those that are there if they are not the lowest."""
    if width == 8:
        for j in range(WORDS):
            words[j] = data[j]
    elif width == 4:  # always the lowest
        for j in range(WORDS // 2):
            words[j] = data[j] & _FOUR
            words[j + WORDS // 2] = data[j] >> np.uint64(4) & _FOUR
    elif width == 2:
        for lane in range(4):
            for j in range(WORDS // 4):
                some = (data[j] >> np.uint64(2 * lane) & _TWO) << shift
                words[j + lane * (WORDS // 4)] = (words[j + lane * (WORDS // 4)] if shift else np.uint64(0)) | some
    else:
        for lane in range(8):
            for j in range(WORDS // 8):
                some = (data[j] >> np.uint64(lane) & _ONE) << shift
                words[j + lane * (WORDS // 8)] = (words[j + lane * (WORDS // 8)] if shift else np.uint64(0)) | some


@part
def pack_group(
    codes: Any, words: Any, start: Any, members: Any, bits: Any, n: Any, planes: Any, buffer: Any, packed: Any
) -> None:
    """Write the codes of a group to their places in the planes.

    Args:
        codes: uint8, shape (GROUP,); overwritten behind the members.
        words: The same memory as uint64.
        start: Index of the first code among all, a multiple of GROUP.
        members: How many there are.
        bits: Of a code.
        n: How many codes there are in all.
        planes: uint8, all planes one after another.
        buffer: uint64, shape (WORDS,).
        packed: The same memory as uint8.
    """
    first, shift = 0, 0
    while bits > 0:
        width = 8 if bits == 8 else (4 if bits >= 4 else (2 if bits >= 2 else 1))
        place = first + start * width // 8
        if members == GROUP:
            _pack(words, width, np.uint64(shift), buffer, packed, planes[place:])
        else:
            run = (members * width + 7) // 8
            codes[members:] = 0
            packed[:run] = 0
            for lane in range(8 // width):
                for j in range(run):
                    packed[j] |= (codes[lane * run + j] >> shift & ((1 << width) - 1)) << lane * width
            planes[place : place + run] = packed[:run]
        first += (n * width + 7) // 8
        shift += width
        bits -= width


@part
def unpack_group(data: Any, start: Any, members: Any, bits: Any, n: Any, words: Any, buffer: Any) -> None:
    """Undo `pack_group`: read the codes of a group from the planes in ``data``."""
    first, shift = 0, 0
    while bits > 0:
        width = 8 if bits == 8 else (4 if bits >= 4 else (2 if bits >= 2 else 1))
        place, run = first + start * width // 8, (members * width + 7) // 8
        some, codes, packed = data[place : place + run], words.view(np.uint8), buffer.view(np.uint8)
        for j in range(some.size):
            packed[j] = some[j]
        if members == GROUP:
            _unpack(buffer, width, np.uint64(shift), words)
        else:
            for lane in range(8 // width):
                for j in range(min(run, members - lane * run)):
                    bits_here = (packed[j] >> lane * width & ((1 << width) - 1)) << shift
                    codes[lane * run + j] = (codes[lane * run + j] if shift else 0) | bits_here
        first += (n * width + 7) // 8
        shift += width
        bits -= width
