"""The scales of the blocks that a program works on: its own, or those that were computed before."""

from __future__ import annotations

import triton.language as tl

from hvd_compress.ops.kernels.cuda.launching import part


@part
def _total(v: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Sums over the blocks of a program: shape (ROWS,)."""
    return tl.sum(tl.reshape(tl.sum(tl.sum(v, 2), 1), [ROWS, v.shape[0] // ROWS]), 1)


@part
def _peak(v: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Largest magnitudes in the blocks of a program: shape (ROWS,)."""
    return tl.max(tl.reshape(tl.max(tl.max(tl.abs(v), 2), 1), [ROWS, v.shape[0] // ROWS]), 1)


@part
def spread(v: tl.tensor, GROUPS: tl.constexpr) -> tl.tensor:
    """A value for each block as one for each of its groups: shape (groups, 1, 1)."""
    wide = tl.broadcast_to(v[:, None], [v.shape[0], GROUPS])
    return tl.reshape(wide, [v.shape[0] * GROUPS])[:, None, None]


@part
def own_scales(
    p: tl.tensor,
    ok: tl.tensor,
    members: tl.tensor,
    clip: tl.tensor,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tl.tensor:
    """The scales of the blocks that a program holds, both of shape (ROWS,)."""
    if KIND == "mean":
        first = _total(tl.div_rn(tl.abs(p), tl.broadcast_to(spread(members, GROUPS), p.shape)), ROWS)
        return first, -first
    elif KIND == "means":
        up = p >= 0
        ups = _total((up & ok).to(tl.float32), ROWS)
        above = spread(tl.maximum(ups, 1.0), GROUPS)
        below = spread(tl.maximum(members - ups, 1.0), GROUPS)
        share = tl.div_rn(p, tl.where(up, above, below))
        return _total(tl.where(up, share, 0.0), ROWS), _total(tl.where(up, 0.0, share), ROWS)
    else:
        peaks = _peak(p, ROWS)
        if KIND == "max":
            return peaks, peaks
        # inside the range of float32, whatever the numbers are
        inside = tl.div_rn(p, tl.broadcast_to(spread(tl.where(peaks > 0, peaks, 1.0), GROUPS), p.shape))
        squares = _total(inside * inside, ROWS)
        if KIND == "l2":
            peaks *= tl.sqrt_rn(squares)
        else:
            peaks = tl.minimum(peaks, clip * peaks * tl.sqrt_rn(tl.div_rn(squares, members)))
        return peaks, peaks


@part
def given_scales(
    given: tl.tensor,
    index: tl.tensor,
    ok: tl.tensor,
    start: tl.tensor,
    number: tl.tensor,
    size: tl.tensor,
    KIND: tl.constexpr,
) -> tl.tensor:
    """The scales of some coordinates, from ``start`` on."""
    if KIND == "one":
        one = tl.full(index.shape, 1.0, tl.float32)
        return one, -one
    # divided by a number of the width of the size: 64 bits would cost more than memory
    block = start // size + ((index - start) + start % size).to(size.dtype) // size
    above = tl.load(given + block, mask=ok, other=1.0)
    if KIND == "means":
        return above, tl.load(given + number + block, mask=ok, other=1.0)
    return above, -above
