"""Which gradients travel together.

Every compression and every collective has a fixed cost, so tensors are merged before they are compressed, in the order
in which backward computes them, so that the first bucket can leave while backward still works on the next (Wang, Wu,
Ng, MergeComp, 2021).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from hvd_compress.bucket import Bucket, Shape
from hvd_compress.errors import GradientError, SpecError
from hvd_compress.methods.base import Method

Merge = int | str

DEFAULT_MERGE = 2
"""MergeComp's finding: two buckets come close to the best partition."""

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
    """

    name: str
    shape: Shape
    dtype: str
    device: str = ""


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
        SpecError: If it is neither a count, nor ``"layer"``, nor ``"bytes:<size>"``.
    """
    if isinstance(merge, str):
        ok = merge == "layer" or _byte_limit(merge) > 0
    else:
        ok = isinstance(merge, int) and not isinstance(merge, bool) and merge >= 1
    if not ok:
        raise SpecError(
            f"merge={merge!r} is not allowed: merge must be a number of buckets (at least 1), 'layer' for one bucket"
            " per tensor, or a size such as 'bytes:64MB'"
        )


def plan(gradients: Sequence[Gradient], method: Method, merge: Merge = DEFAULT_MERGE) -> list[Planned]:
    """Put gradients into buckets.

    Gradients share a bucket only if the same method carries them, in the same precision, on the same device. Those that
    a policy leaves dense share one; the others are cut by ``merge``. Empty gradients are in none.

    Args:
        gradients: In the order in which the parameters are used; backward comes to the last one first.
        method: Whose ``route`` says what carries each gradient.
        merge: Number of buckets (of about equal bytes), ``"layer"`` for one per gradient, or ``"bytes:64MB"`` for as
            many as it takes to keep each below that size (unless a single gradient is larger).

    Returns:
        The buckets, in the order in which backward fills them.
    """
    check_merge(merge)
    groups: dict[tuple[Method, str, str], list[int]] = {}
    for position in reversed(range(len(gradients))):
        name, shape, dtype, device = gradients[position]
        if 0 not in shape:
            groups.setdefault((method.route(name, shape), dtype, device), []).append(position)

    planned: list[Planned] = []
    for (carrier, dtype, _), members in groups.items():
        sizes = [Bucket("", (gradients[i].shape,), dtype).numel for i in members]
        cut = 1 if carrier.linear and carrier != method else merge
        for part in _cut(members, sizes, cut, itemsize=8 if dtype == "float64" else 4):
            bucket = Bucket(f"b{len(planned)}", tuple(gradients[i].shape for i in part), dtype)
            planned.append(Planned(bucket, carrier, tuple(part)))
    return planned


def _cut(members: list[int], sizes: list[int], merge: Merge, itemsize: int) -> list[list[int]]:
    """Cut a list into contiguous parts."""
    if merge == "layer":
        return [[member] for member in members]
    if isinstance(merge, str):
        limit, share = _byte_limit(merge) / itemsize, 0.0
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
