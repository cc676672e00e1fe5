"""Which gradients travel together.

Every compression and every collective has a fixed cost, so tensors are merged before they are compressed, in the order
in which backward computes them, so that the first bucket can leave while backward still works on the next (Wang, Wu,
Ng, MergeComp, 2021).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from hvd_compress.core.bucket import Bucket, Shape
from hvd_compress.errors import GradientError, SpecError
from hvd_compress.methods.base import Method
from hvd_compress.wrappers.router import Everywhere, Routable, routed

Merge = int | str

DEFAULT_MERGE: Merge = "auto"

Cuts = tuple[int, ...]
"""A partition: the positions, among the compressed gradients in backward order, at which a new bucket begins."""

_UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}


PRECISION = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}
"""What gradients are computed in: 16-bit ones in float32, as residuals are too small for 16 bits."""


class Gradient(NamedTuple):
    """What the plan needs to know of a gradient.

    Attributes:
        name: Of its parameter.
        shape: Of the gradient.
        dtype: That a method computes in: ``"float32"`` or ``"float64"``.
        device: Gradients on different devices never share a bucket.
        late: No backward pass gives it. Such gradients share a bucket of their own, so that no other waits for them.
    """

    name: str
    shape: Shape
    dtype: str
    device: str = ""
    late: bool = False


def gradient(name: str, shape: Shape, dtype: str, device: str = "") -> Gradient:
    """Take down the facts of a gradient.

    Raises:
        GradientError: If its dtype cannot be compressed.
    """
    if dtype not in PRECISION:
        allowed = ", ".join(PRECISION)
        raise GradientError(
            f"the gradient of {name!r} has dtype {dtype}, which cannot be compressed; allowed: {allowed}"
        )
    return Gradient(name, shape, PRECISION[dtype], device)


class _Routed(NamedTuple):
    """A gradient on its way into a bucket.

    Attributes:
        position: In the list that the plan is made for.
        group: Only gradients of the same one share a bucket.
        size: Its bytes.
        merged: Whether ``merge`` counts for it: not where a policy leaves it dense, or it is late.
    """

    position: int
    group: tuple[Method, str, str, bool]
    size: int
    merged: bool


class Planned(NamedTuple):
    """A bucket of the plan.

    Attributes:
        bucket: What it is made of.
        method: What carries it.
        members: Positions of its gradients in the list that the plan was made for.
    """

    bucket: Bucket
    method: Method
    members: tuple[int, ...]


def check_merge(merge: Merge) -> None:
    """Refuse a ``merge`` that cannot be.

    Raises:
        SpecError: If it is none of what `plan` takes.
    """
    if isinstance(merge, str):
        ok = merge in ("auto", "search", "layer") or _byte_limit(merge) > 0 or bool(_positions(merge))
    else:
        ok = isinstance(merge, int) and not isinstance(merge, bool) and merge >= 1
    if not ok:
        raise SpecError(
            f"merge={merge!r} is not allowed: merge must be a number of buckets (at least 1), 'auto', 'search', 'layer'"
            " for one bucket per tensor, a size such as 'bytes:64MB', or positions of at least 1 that grow, such as"
            " 'at:12,40'"
        )


def plan(gradients: Sequence[Gradient], method: Routable, merge: Merge = DEFAULT_MERGE) -> list[Planned]:
    """Put gradients into buckets.

    Gradients share a bucket only if the same method carries them, in the same precision, on the same device. Those that
    a policy leaves dense share one, late ones share one; the others are cut by ``merge``. Empty gradients are in none.

    Args:
        gradients: In the order in which the parameters are used; backward comes to the last one first.
        method: What carries them, or the router that says it of each.
        merge: One of

            * ``"auto"``: the partition that `start` gives; sizes alone decide;
            * ``"search"``: the same, from which `hvd_compress.bucket_autotune` goes on;
            * a number of buckets, of about equal bytes;
            * ``"layer"`` for one per gradient;
            * ``"bytes:64MB"`` for as many as it takes to keep each below that size (unless a gradient is larger);
            * ``"at:12,40"`` for the very partition: a bucket ends before the 13th and another before the 41st of the
              compressed gradients, counted in the order in which backward comes to them.

            Where several methods, precisions or devices keep gradients apart, a number or a size holds for each of
            them, but the positions of ``"auto"``, ``"search"`` and ``"at:"`` for all together, as they stand for times
            of backward.

    Returns:
        The buckets, in the order in which backward fills them.

    Raises:
        SpecError: If ``merge`` cannot be, or not for so few gradients.
    """
    check_merge(merge)
    found = _routed(gradients, method)
    cuts = _cuts(merge, [one.size for one in found if one.merged])
    order = [one.position for one in found if one.merged]
    time_of = {position: bisect_right(cuts, i) for i, position in enumerate(order)}
    groups: dict[tuple[Method, str, str, bool], list[_Routed]] = {}
    for one in found:
        groups.setdefault(one.group, []).append(one)

    planned: list[Planned] = []
    for (carrier, dtype, *_), members in groups.items():
        positions = [member.position for member in members]
        if not members[0].merged:
            parts = [positions]
        elif cuts or merge in ("auto", "search"):
            parts = [list(part) for _, part in groupby(positions, time_of.__getitem__)]
        else:
            parts = _cut(positions, [member.size for member in members], merge)
        for part in parts:
            bucket = Bucket(f"b{len(planned)}", tuple(gradients[i].shape for i in part), dtype)
            planned.append(Planned(bucket, carrier, tuple(part)))
    return planned


def merged_sizes(gradients: Sequence[Gradient], method: Routable) -> list[int]:
    """The bytes of the gradients that ``merge`` counts for, in backward order."""
    return [one.size for one in _routed(gradients, method) if one.merged]


def start(sizes: Sequence[int]) -> Cuts:
    """Two buckets of about equal bytes, which MergeComp finds close to the best; one if there is but one gradient."""
    return (nearest(sizes, sum(sizes) / 2),) if len(sizes) > 1 else ()


def nearest(sizes: Sequence[int], place: float, first: int = 0, last: int | None = None) -> int:
    """The position between two others (the ends, if not told) with about so many bytes before it."""
    before = list(accumulate(sizes, initial=0))
    return min(range(first + 1, len(sizes) if last is None else last), key=lambda i: (abs(before[i] - place), -i))


def pin(cuts: Cuts) -> Merge:
    """The ``merge`` that stands for a partition."""
    return f"at:{','.join(map(str, cuts))}" if cuts else 1


def _routed(gradients: Sequence[Gradient], method: Routable) -> list[_Routed]:
    """All gradients that are not empty, in the order in which backward comes to them."""
    router, found = routed(method), []
    for position in reversed(range(len(gradients))):
        name, shape, dtype, device, late = gradients[position]
        if 0 not in shape:
            carrier = router.route(name, shape)
            size = Bucket("", (shape,), dtype).numel * (8 if dtype == "float64" else 4)
            merged = not late and (not carrier.linear or isinstance(router, Everywhere))
            found.append(_Routed(position, (carrier, dtype, device, late), size, merged))
    return found


def _cuts(merge: Merge, sizes: Sequence[int]) -> Cuts:
    """The positions that a ``merge`` stands for; none for one that is no partition of all gradients together."""
    if merge in ("auto", "search"):
        return start(sizes)
    cuts = _positions(merge) if isinstance(merge, str) else ()
    if cuts and cuts[-1] >= len(sizes):
        raise SpecError(
            f"merge={merge!r} is not allowed here: with {len(sizes)} compressed gradients, positions must be in 1 .."
            f" {len(sizes) - 1}; take merge='auto', or positions that were found for this model"
        )
    return cuts


def _cut(members: list[int], sizes: list[int], merge: Merge) -> list[list[int]]:
    """Cut a list into contiguous parts."""
    if merge == "layer":
        return [[member] for member in members]
    if isinstance(merge, str):
        limit, share = float(_byte_limit(merge)), 0.0
    else:
        limit, share = 0.0, sum(sizes) / merge
    parts: list[list[int]] = []
    before = filled = 0
    for member, size in zip(members, sizes, strict=True):
        if not parts or (limit and filled + size > limit) or (share and before + size / 2 > len(parts) * share):
            parts.append([])
            filled = 0
        parts[-1].append(member)
        filled += size
        before += size
    return parts


def _byte_limit(merge: str) -> int:
    """The size in ``"bytes:64MB"`` in bytes; 0 if it cannot be read."""
    match = re.fullmatch(r"bytes:(\d+)(B|KB|MB|GB)?", merge)
    return int(match[1]) * _UNITS[match[2] or "B"] if match else 0


def _positions(merge: str) -> Cuts:
    """The positions in ``"at:12,40"``; none if they cannot be read, or do not grow."""
    match = re.fullmatch(r"at:(\d+(?:,\d+)*)", merge)
    cuts = tuple(map(int, match[1].split(","))) if match else ()
    return cuts if list(cuts) == sorted(set(cuts) - {0}) else ()
