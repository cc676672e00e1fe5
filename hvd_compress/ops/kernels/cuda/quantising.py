"""Codes of a few bits: scale, round, pack and return the error, in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hvd_compress.ops.blocks import Blocks
from hvd_compress.ops.code import Code
from hvd_compress.ops.coding import TINY
from hvd_compress.ops.kernels.cuda.blocks import given_scales, own_scales, spread
from hvd_compress.ops.kernels.cuda.codes import places, run_of, store_plane
from hvd_compress.ops.kernels.cuda.float8 import to_float8
from hvd_compress.ops.kernels.cuda.hashing import bits_of, keys, uniform
from hvd_compress.ops.kernels.cuda.launching import flat, kernel, launch, part, tiles, warps_for
from hvd_compress.ops.kernels.cuda.powers import encode_bfloat16, encode_powers
from hvd_compress.ops.kernels.cuda.scales import scales
from hvd_compress.ops.kernels.cuda.top_code import encode_top
from hvd_compress.ops.packing import GROUP

_TINY = tl.constexpr(TINY)
_GROUP = tl.constexpr(GROUP)

_GROUPS = 4
"""Groups of a program that holds whole blocks of fewer."""

_LARGEST = 8192
"""Blocks of more coordinates get their scales before."""


@part
def _levels(
    p: tl.tensor,
    index: tl.tensor,
    scale: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    BITS: tl.constexpr,
    DITHER: tl.constexpr,
) -> tl.tensor:
    """Codes of multiples of ``scale / L``, and what they stand for."""
    top = tl.full(scale.shape, 2 ** (BITS - 1) - 1, tl.float32)
    inverse = tl.div_rn(top, tl.where(scale > _TINY, scale, 1.0))
    noise = 0.5
    if DITHER:
        noise = uniform(index, first, second)
    y = tl.minimum(tl.maximum(p * inverse + noise, -top), top)
    codes = y.to(tl.int32)
    codes -= (codes.to(tl.float32) > y).to(tl.int32)  # the floor; the device's own would take -1e-39 for zero
    return codes + top.to(tl.int32), codes.to(tl.float32) * tl.div_rn(scale, top)


@part
def _signs(
    p: tl.tensor, above: tl.tensor, below: tl.tensor, first: tl.tensor, second: tl.tensor, KIND: tl.constexpr
) -> tl.tensor:
    """Codes of signs, and what they stand for."""
    up = p >= 0
    if KIND == "one":
        up = tl.where(uniform(tl.cast(0, tl.uint32), first, second) < 0.5, up, p > 0)
    return up.to(tl.int32), tl.where(up, above, below)


@part
def _encode_plane(
    x: tl.tensor,
    error: tl.tensor,
    given: tl.tensor,
    plane: tl.tensor,
    groups: tl.tensor,
    there: tl.tensor,
    above: tl.tensor,
    below: tl.tensor,
    n: tl.tensor,
    number: tl.tensor,
    size: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    PART: tl.constexpr,
    DITHER: tl.constexpr,
    RETURN_ERROR: tl.constexpr,
    OWN: tl.constexpr,
    MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr,
) -> tl.tensor:
    """Write the codes of some groups to a plane of PART bits, with the last one the error: the plane's bytes."""
    run = run_of(groups, n, 8 // PART) * there
    index, ok = places(groups, run, n, 8 // PART)
    p = tl.load(x + index, mask=ok, other=0.0)
    if not OWN:
        above, below = given_scales(given, index, ok, tl.min(groups) * _GROUP, number, size, KIND)
    if BITS == 1:
        codes, value = _signs(p, above, below, first, second, KIND)
    elif MANTISSA:
        codes, value = to_float8(p, index, above, first, second, MANTISSA, SMALLEST, DITHER)
    else:
        codes, value = _levels(p, index, above, first, second, BITS, DITHER)
    codes = codes >> (BITS & (16 - 2 * PART)) & ((1 << PART) - 1)
    store_plane(plane, tl.where(ok, codes, 0), groups, run, 8 // PART)
    if RETURN_ERROR and BITS & (PART - 1) == 0:
        if BITS != PART:
            tl.debug_barrier()  # planes differ in which thread reads what, and error may be x
        tl.store(error + index, p - value, mask=ok)
    return (n.to(tl.int64) * PART + 7) // 8


@kernel("n", "number", "size", "first", "second", "clip")
def _encode(
    x: tl.tensor,
    error: tl.tensor,
    given: tl.tensor,
    planes: tl.tensor,
    n: tl.tensor,
    number: tl.tensor,
    size: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    clip: tl.tensor,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    WIDEST: tl.constexpr,
    DITHER: tl.constexpr,
    RETURN_ERROR: tl.constexpr,
    OWN: tl.constexpr,
    MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    program, slot = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS * GROUPS)
    if OWN:  # ROWS blocks of up to GROUPS groups each
        each = (size + _GROUP - 1) // _GROUP
        groups = (program * ROWS + slot // GROUPS) * each + slot % GROUPS
        there = (slot % GROUPS < each).to(tl.int32)
        row = program * ROWS + tl.arange(0, ROWS)
        members = tl.minimum(tl.maximum(n - row * size, 1), size).to(tl.float32)
        index, ok = places(groups, run_of(groups, n, 8 // WIDEST) * there, n, 8 // WIDEST)
        p = tl.load(x + index, mask=ok, other=0.0)
        firsts, seconds = own_scales(p, ok, members, clip, KIND, ROWS, GROUPS)
        above, below = spread(firsts, GROUPS), spread(seconds, GROUPS)
    else:
        groups = program * (ROWS * GROUPS) + slot
        there, above, below = 1, 0.0, 0.0
    for place in tl.static_range(4):
        if BITS & 8 >> place:
            planes += _encode_plane(
                x,
                error,
                given,
                planes,
                groups,
                there,
                above,
                below,
                n,
                number,
                size,
                bits_of(first),
                bits_of(second),
                KIND,
                BITS,
                8 >> place,
                DITHER,
                RETURN_ERROR,
                OWN,
                MANTISSA,
                SMALLEST,
            )
    if OWN:  # last: then the loads above are those of the first plane
        tl.store(given + row, firsts, mask=row < number)
        if KIND == "means":
            tl.store(given + number + row, seconds, mask=row < number)


def quantise(
    x: Tensor, code: Code, seed: int = 0, return_error: bool = False, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """See `Ops.quantise`.

    Args:
        x: float32, shape ``(n,)``.
        code: How.
        seed: Of the dither, or of the sign of zeros.
        return_error: Return the error too.
        out: Where that is written; may be ``x``. A new array if not given.

    Returns:
        Bytes, and the error.
    """
    x, n = flat(x), x.numel()
    error = x if not return_error else torch.empty_like(x) if out is None else out
    data = torch.empty(code.size(n, "float32"), dtype=torch.uint8, device=x.device)
    if code.kind in ("powers", "bfloat16"):
        encode = encode_powers if code.kind == "powers" else encode_bfloat16
        encode(x, error, data, seed, return_error)
    elif code.kind == "top":
        encode_top(x, error, data, code, return_error)
    else:
        _quantise(x, code, seed, return_error, error, data)
    return data, error if return_error else None


def _quantise(x: Tensor, code: Code, seed: int, return_error: bool, error: Tensor, data: Tensor) -> None:
    blocks = Blocks.of(x.numel(), code.block)
    mantissa, smallest = code.float8 or (0, 0)
    groups = triton.next_power_of_2(tiles(blocks.size, GROUP))
    own = code.kind != "one" and blocks.size <= _LARGEST and (blocks.number <= 1 or blocks.size % GROUP == 0)
    groups = groups if own else 1
    rows = max(1, _GROUPS // groups)
    given = data[: 4 * code.scales * blocks.number].view(torch.float32)
    if not own:
        given.copy_(scales(x, code, blocks).reshape(-1))
    launch(
        _encode,
        tiles(blocks.number if own else tiles(x.numel(), GROUP), rows),
        x,
        error,
        given,
        data[4 * code.scales * blocks.number :],
        *blocks,
        *keys(seed),
        float(code.clip),
        warps=warps_for(rows * groups * GROUP),
        KIND="max" if code.float8 or (code.kind == "clipped" and not code.clip) else code.kind,
        BITS=code.bits,
        WIDEST=1 << code.bits.bit_length() - 1,
        DITHER=code.dither,
        RETURN_ERROR=return_error,
        OWN=own,
        MANTISSA=mantissa,
        SMALLEST=smallest,
        ROWS=rows,
        GROUPS=groups,
    )
