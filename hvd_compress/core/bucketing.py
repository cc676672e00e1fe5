"""Assign gradients to buckets.

Each compression and each collective has a fixed cost, so gradients are merged before they are compressed. Buckets
follow the order of backward, so the first one is exchanged while backward computes the next (Wang, Wu, Ng, MergeComp,
2021).
"""

from __future__ import annotations

import logging
import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, groupby
from typing import NamedTuple

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import World
from hvd_compress.core.method import Method
from hvd_compress.core.router import Everywhere, Routable, routed
from hvd_compress.errors import GradientError, SpecError, short
from hvd_compress.ops.arrays import Shape

_LOG = logging.getLogger("hvd_compress")

Merge = int | str

DEFAULT_MERGE: Merge = "auto"

Cuts = tuple[int, ...]
"""A partition: positions among the compressed gradients, in backward order, at which a new bucket begins."""

_UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}


PRECISION = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}
"""Dtypes that methods compute in: float32 for 16-bit gradients, as residuals are too small for 16 bits."""


class Gradient(NamedTuple):
    """Description of a gradient for `plan`.

    Attributes:
        name: Name of its parameter.
        shape: Shape of the gradient.
        dtype: Dtype that the method computes in: ``"float32"`` or ``"float64"``.
        device: Gradients on different devices never share a bucket.
        late: Backward does not produce it. Late gradients share a bucket, so that no other bucket waits for them.
    """

    name: str
    shape: Shape
    dtype: str
    device: str = ""
    late: bool = False


def gradient(name: str, shape: Shape, dtype: str, device: str = "") -> Gradient:
    """Describe a gradient.

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
    """Gradient with its method, before it is put into a bucket.

    Attributes:
        position: Position in the list of gradients.
        group: Gradients share a bucket only within a group.
        size: Size in bytes.
        merged: Whether ``merge`` applies to it; false for late gradients and those that a policy leaves dense.
    """

    position: int
    group: tuple[Method, str, str, bool]
    size: int
    merged: bool


class Planned(NamedTuple):
    """Bucket of a plan.

    Attributes:
        bucket: Shapes and dtype.
        method: The method that compresses it.
        members: Positions of its gradients in the list of gradients.
    """

    bucket: Bucket
    method: Method
    members: tuple[int, ...]


def check_merge(merge: Merge) -> None:
    """Validate ``merge``.

    Raises:
        SpecError: If `plan` does not accept it.
    """
    if isinstance(merge, str):
        ok = merge in ("auto", "search", "layer") or _byte_limit(merge) > 0 or bool(_positions(merge))
    else:
        ok = isinstance(merge, int) and not isinstance(merge, bool) and merge >= 1
    if not ok:
        raise SpecError(
            f"merge={short(merge)} is not allowed: merge must be a number of buckets (at least 1), 'auto', 'search',"
            " 'layer' for one bucket per tensor, a size such as 'bytes:64MB', or increasing positions (at least 1) such"
            " as 'at:12,40'"
        )


def plan(gradients: Sequence[Gradient], method: Routable, merge: Merge = DEFAULT_MERGE) -> list[Planned]:
    """Assign gradients to buckets.

    Gradients share a bucket only if they have the same method, dtype and device. Gradients that a policy leaves dense
    share one bucket, and late ones share another; ``merge`` partitions the rest. Empty gradients get no bucket.

    Args:
        gradients: Gradients in the order in which the forward pass uses their parameters.
        method: The method that compresses them, or a router.
        merge: One of

            * ``"auto"``: the partition of `start`, from the sizes alone;
            * ``"search"``: the same, as the starting point of `hvd_compress.engine.bucket_autotune`;
            * a number of buckets of about equal bytes;
            * ``"layer"``: one bucket per gradient;
            * ``"bytes:64MB"``: buckets of at most this size, except for larger single gradients;
            * ``"at:12,40"``: an explicit partition. New buckets begin after the first 12 and the first 40 compressed
              gradients in backward order.

            With several methods, dtypes or devices, a number or a size applies to each of their groups. The positions
            of ``"auto"``, ``"search"`` and ``"at:"`` apply to all gradients together, as they stand for points in time
            of backward.

    Returns:
        The buckets, in the order in which backward fills them.

    Raises:
        SpecError: If ``merge`` is invalid, or has positions beyond the number of gradients.
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
    for (its_method, dtype, *_), members in groups.items():
        positions = [member.position for member in members]
        if not members[0].merged:
            parts = [positions]
        elif cuts or merge in ("auto", "search"):
            parts = [list(part) for _, part in groupby(positions, time_of.__getitem__)]
        else:
            parts = _cut(positions, [member.size for member in members], merge)
        for part in parts:
            bucket = Bucket(f"b{len(planned)}", tuple(gradients[i].shape for i in part), dtype)
            planned.append(Planned(bucket, its_method, tuple(part)))
    return planned


def advise(gradients: Sequence[Gradient], method: Routable, world: World) -> None:
    """Warn once, on rank 0, of a compressor that compresses little of what it is made for.

    Args:
        gradients: The gradients.
        method: The method that compresses them, or a router.
        world: The ranks.
    """
    if world.rank:
        return
    router, sizes = routed(method), {one: math.prod(one.shape) for one in gradients}
    obstacles: dict[str, list[Gradient]] = {}
    for one in gradients:
        if reason := router.obstacle(one.name, one.shape):
            obstacles.setdefault(reason, []).append(one)
    left = sum(sizes[one] for those in obstacles.values() for one in those)
    sent = sum(sizes[one] for one in gradients if not router.route(one.name, one.shape).linear)
    if left > sent:
        why = "; ".join(f"{_few(those)}: {reason}" for reason, those in obstacles.items())
        _warn(f"{left / sum(sizes.values()):.0%} of the gradients are not compressed by {method}: {why}")
    advise_nodes(method, world)
    if patterns := router.unmatched([one.name for one in gradients]):
        known = ", ".join(repr(one.name) for one in gradients[:3])
        _warn(f"no parameter matches the pattern {patterns[0]!r} of by_name; their names are {known}, ...")


def advise_nodes(method: Routable, world: World, scatters: bool = False) -> None:
    """Warn once, on rank 0, of a hierarchy that does not fit the nodes.

    Args:
        method: The method, or a router.
        world: The ranks.
        scatters: Whether gradients are reduce-scattered, so that each rank sends parts of its own to all others.
    """
    router, local = routed(method), world.local_size
    if router.hierarchical and world.nodes == 1 and world.size > 1 and not world.rank:
        _warn(f"all {world.size} ranks are on one node, where hierarchical=on sums without compression: leave it out")
    if scatters and 1 < local < world.size and not (router.hierarchical or router.linear or world.rank):
        _warn(
            f"each of the {local} ranks of a node sends its gradients to all other nodes: with hierarchical=on, they"
            f" are summed within the node first, and nodes exchange 1/{local} of the bytes"
        )


def _few(gradients: Sequence[Gradient]) -> str:
    """Describe some gradients by the largest one."""
    largest = max(gradients, key=lambda one: math.prod(one.shape))
    return f"{len(gradients)} such as {largest.name!r} of shape {largest.shape}"


@cache
def _warn(text: str) -> None:
    _LOG.warning(text)


def merged_sizes(gradients: Sequence[Gradient], method: Routable) -> list[int]:
    """Return the sizes in bytes of the gradients that ``merge`` applies to, in backward order."""
    return [one.size for one in _routed(gradients, method) if one.merged]


def start(sizes: Sequence[int]) -> Cuts:
    """Return two buckets of about equal bytes, which MergeComp finds close to the best; one for a single gradient."""
    return (nearest(sizes, sum(sizes) / 2),) if len(sizes) > 1 else ()


def nearest(sizes: Sequence[int], place: float, first: int = 0, last: int | None = None) -> int:
    """Return the position between ``first`` and ``last`` whose preceding bytes are closest to ``place``."""
    before = list(accumulate(sizes, initial=0))
    return min(range(first + 1, len(sizes) if last is None else last), key=lambda i: (abs(before[i] - place), -i))


def pin(cuts: Cuts) -> Merge:
    """Return the ``merge`` of an explicit partition."""
    return f"at:{','.join(map(str, cuts))}" if cuts else 1


def _routed(gradients: Sequence[Gradient], method: Routable) -> list[_Routed]:
    """Return all gradients that are not empty, in backward order, with their methods."""
    router, found = routed(method), []
    for position in reversed(range(len(gradients))):
        name, shape, dtype, device, late = gradients[position]
        if 0 not in shape:
            its_method = router.route(name, shape)
            size = Bucket("", (shape,), dtype).numel * (8 if dtype == "float64" else 4)
            merged = not late and (its_method.merges or isinstance(router, Everywhere))
            found.append(_Routed(position, (its_method, dtype, device, late), size, merged))
    return found


def _cuts(merge: Merge, sizes: Sequence[int]) -> Cuts:
    """Return the positions of ``merge``; empty if it is a number, a size or ``"layer"``."""
    if merge in ("auto", "search"):
        return start(sizes)
    cuts = _positions(merge) if isinstance(merge, str) else ()
    if cuts and cuts[-1] >= len(sizes):
        raise SpecError(
            f"merge={short(merge)} is not allowed here: with {len(sizes)} compressed gradients, positions must be in"
            f" 1 .. {len(sizes) - 1}; take merge='auto', or the positions logged for this model"
        )
    return cuts


def _cut(members: list[int], sizes: list[int], merge: Merge) -> list[list[int]]:
    """Split a list into contiguous parts."""
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
    """Return the size in ``"bytes:64MB"`` in bytes; 0 if it is invalid."""
    match = re.fullmatch(r"bytes:(\d+)(B|KB|MB|GB)?", merge)
    return int(match[1]) * _UNITS[match[2] or "B"] if match else 0


def _positions(merge: str) -> Cuts:
    """Return the positions in ``"at:12,40"``; empty if they are invalid or not increasing."""
    match = re.fullmatch(r"at:(\d+(?:,\d+)*)", merge)
    cuts = tuple(map(int, match[1].split(","))) if match else ()
    return cuts if list(cuts) == sorted(set(cuts) - {0}) else ()
