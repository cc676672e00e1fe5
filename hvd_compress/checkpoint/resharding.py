"""Reshard states to another world size, to survivors and new ranks, or to other buckets.

It is pure numpy without communication; `hvd_compress.checkpoint.state_files` and `hvd_compress.checkpoint.elastic`
collect the states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hvd_compress.core.bucket import Bucket
from hvd_compress.core.collectives import World
from hvd_compress.core.method import Method
from hvd_compress.core.state_tree import Kind, Per, Role, flatten, kinds
from hvd_compress.ops.arrays import Shape
from hvd_compress.ops.numpy import NumpyOps

Leaves: TypeAlias = Mapping[str, Any]
"""Leaves of a state by name, as numpy arrays and ints."""

_EQUAL = (Role.SHARED, Role.MEASURED)
_CUT = (Per.COORDINATE, Per.GRADIENT)


class Former(NamedTuple):
    """State of a former rank.

    Attributes:
        leaves: Leaves of its state; those that no rank needs may be missing.
        rank: Its former rank.
        heir: Rank that inherits its leaves.
    """

    leaves: Leaves
    rank: int
    heir: int


def redistribute(
    fresh: Leaves, kinds: Mapping[str, Kind], numel: int, formers: Sequence[Former], size: int, world: World
) -> dict[str, Any]:
    """Make the state of one rank from the states of the former ranks.

    The sum over the ranks of ``Role.OWN`` leaves is preserved if all former ranks are given.

    Args:
        fresh: Initial state of this rank.
        kinds: Kinds of its leaves.
        numel: Number of elements of the bucket.
        formers: Former ranks, at least one; leaves that are equal on all ranks are taken from the first one.
        size: Former world size.
        world: The current ranks.
    """

    def leaf(path: str, new: Any) -> Any:
        role = kinds[path].role
        mine = [former.leaves[path] for former in formers if former.heir == world.rank and path in former.leaves]
        if role in _EQUAL:
            return formers[0].leaves[path]
        if role is Role.OWN:
            return sum(mine[1:], mine[0]) if mine else new
        if role is Role.PRIVATE:
            return mine[0] if mine else new
        if role is Role.SERVED:
            return _part(path, new, numel, formers, size, world)
        if role is Role.TOTAL:
            parts = [former.leaves[_beside(path, kinds)] for former in formers]
            return sum(parts[1:], parts[0])
        return new

    return {path: leaf(path, new) for path, new in fresh.items()}


def _part(path: str, new: Any, numel: int, formers: Sequence[Former], size: int, world: World) -> Any:
    """Join the shards of a vector and return this rank's new shard."""
    length = -(-numel // size)
    whole = np.zeros(max(size * length, numel), new.dtype)
    for former in formers:
        if former.rank < size and path in former.leaves and former.leaves[path].shape == (length,):
            whole[former.rank * length : (former.rank + 1) * length] = former.leaves[path]
    padded = np.zeros(world.size * len(new), new.dtype)
    padded[:numel] = whole[:numel]
    return padded[world.rank * len(new) : (world.rank + 1) * len(new)]


def _beside(path: str, kinds: Mapping[str, Kind]) -> str:
    """Return the name of the leaf that a total sums."""
    place = path.rpartition(".")[0]
    return next(p for p, kind in kinds.items() if kind.role is Role.OWN and p.rpartition(".")[0] == place)


def needed_by_others(leaves: Leaves, kinds: Mapping[str, Kind], first: bool) -> dict[str, Any]:
    """Return the leaves that `redistribute` needs on other ranks; ``first`` if the rank is the first of the formers."""
    needed = {Role.SERVED, *(_EQUAL if first else ())}
    if any(kind.role is Role.TOTAL for kind in kinds.values()):
        needed.add(Role.OWN)
    return {path: leaf for path, leaf in leaves.items() if kinds[path].role in needed}


class BucketSnapshot(NamedTuple):
    """State of a bucket on this rank.

    Attributes:
        names: Identifiers of its parameters, in order.
        bucket: Shapes and dtype.
        method: Its method.
        leaves: Leaves of the state.
    """

    names: Sequence[Any]
    bucket: Bucket
    method: Method
    leaves: Leaves


def inherit(fresh: BucketSnapshot, formers: Sequence[BucketSnapshot]) -> dict[str, Any]:
    """Return the state of a new bucket, taken over from former buckets of the same rank.

    Leaves per gradient, such as residuals and low-rank factors, are taken over parameter by parameter. Counters come
    from the first former bucket with the same method. All other leaves need a former bucket with exactly the same
    parameters (see `divisible`).

    Args:
        fresh: The new bucket with its initial state.
        formers: Former buckets.
    """
    formers = [former for former in formers if former.method == fresh.method]
    for former in formers:
        if tuple(former.names) == tuple(fresh.names) and former.bucket.shapes == fresh.bucket.shapes:
            return dict(former.leaves)
    leaves = dict(fresh.leaves)
    for path, kind in _kinds(fresh).items():
        if kind.per is Per.BUCKET and formers:
            leaves[path] = formers[0].leaves[path]
        elif kind.per in _CUT:
            leaves[path] = _joined(path, kind.per, fresh, formers)
    return leaves


def divisible(kept: BucketSnapshot) -> bool:
    """Return whether other buckets of the same parameters can `inherit` this state without loss."""
    return all(kind.per is Per.BUCKET or kind.per in _CUT for kind in _kinds(kept).values())


def _kinds(kept: BucketSnapshot) -> dict[str, Kind]:
    return kinds(kept.method.init(NumpyOps(), kept.bucket, World(0, 1)))


def _joined(path: str, per: Per, fresh: BucketSnapshot, formers: Sequence[BucketSnapshot]) -> Any:
    """Return a leaf joined from the pieces of former buckets."""
    vector, places = deepcopy(fresh.leaves[path]), _places(path, per, fresh)
    for former in formers:
        for name, place in _places(path, per, former).items():
            if name in places and _length(place) == _length(places[name]):
                vector[places[name]] = former.leaves[path][place]
    return vector


def _places(path: str, per: Per, kept: BucketSnapshot) -> dict[Any, slice]:
    """Return the slice of each parameter in a leaf that can be split."""
    bucket = kept.bucket
    places = slices(bucket.sizes) if per is Per.COORDINATE else places_of(path, kept.method, bucket)
    return dict(zip(kept.names, places, strict=True))


def places_of(path: str, method: Method, bucket: Bucket) -> list[slice]:
    """Return the slice of each gradient in a leaf that has one piece per gradient."""
    return slices([_alone(method, shape, bucket.dtype)[path] for shape in bucket.shapes])


def slices(sizes: Sequence[int]) -> list[slice]:
    """Return the slices of pieces that follow each other."""
    return [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]


@cache
def _alone(method: Method, shape: Shape, dtype: str) -> dict[str, int]:
    """Return the lengths of the leaves of a gradient in a bucket of its own."""
    state = method.init(NumpyOps(), Bucket("", (shape,), dtype), World(0, 1))
    return {path: np.size(leaf) for path, leaf in flatten(state).items()}


def _length(place: slice) -> int:
    return int(place.stop - place.start)
