"""Reshard states: to another number of ranks, to survivors and newcomers, to other buckets.

All in numpy and without communication: `hvd_compress.checkpoint.state_files` and `hvd_compress.checkpoint.elastic`
bring the states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hvd_compress.core.bucket import Bucket, Shape
from hvd_compress.core.collectives import World
from hvd_compress.core.state_tree import Kind, Per, Role, flatten, kinds
from hvd_compress.methods.base import Method
from hvd_compress.ops.numpy import NumpyOps

Leaves: TypeAlias = Mapping[str, Any]
"""The leaves of a state by name, as numpy arrays and ints."""

_EQUAL = (Role.SHARED, Role.MEASURED)
_CUT = (Per.COORDINATE, Per.GRADIENT)


class Former(NamedTuple):
    """What a rank of before has left.

    Attributes:
        leaves: Of its state; those that nobody needs may be missing.
        rank: Its number then.
        heir: The rank that goes on with what it kept.
    """

    leaves: Leaves
    rank: int
    heir: int


def redistribute(
    fresh: Leaves, kinds: Mapping[str, Kind], numel: int, formers: Sequence[Former], size: int, world: World
) -> dict[str, Any]:
    """Make the state of one rank from the states of the ranks of before.

    The sum over the ranks of what is ``Role.OWN`` stays the same, as far as all ranks of before are there.

    Args:
        fresh: A new state of this rank.
        kinds: Of its leaves.
        numel: Elements of the bucket.
        formers: The ranks of before; the first one tells what is equal on all. At least one.
        size: How many there were.
        world: The ranks of now.
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
    """Put the parts of a vector together and cut it anew."""
    length = -(-numel // size)
    whole = np.zeros(max(size * length, numel), new.dtype)
    for former in formers:
        if former.rank < size and path in former.leaves and former.leaves[path].shape == (length,):
            whole[former.rank * length : (former.rank + 1) * length] = former.leaves[path]
    padded = np.zeros(world.size * len(new), new.dtype)
    padded[:numel] = whole[:numel]
    return padded[world.rank * len(new) : (world.rank + 1) * len(new)]


def _beside(path: str, kinds: Mapping[str, Kind]) -> str:
    """The leaf that a total is the sum of."""
    place = path.rpartition(".")[0]
    return next(p for p, kind in kinds.items() if kind.role is Role.OWN and p.rpartition(".")[0] == place)


def needed_by_others(leaves: Leaves, kinds: Mapping[str, Kind], first: bool) -> dict[str, Any]:
    """The leaves of a rank that `redistribute` wants on other ranks; ``first``: as the first of the formers."""
    needed = {Role.SERVED, *(_EQUAL if first else ())}
    if any(kind.role is Role.TOTAL for kind in kinds.values()):
        needed.add(Role.OWN)
    return {path: leaf for path, leaf in leaves.items() if kinds[path].role in needed}


class Kept(NamedTuple):
    """The state of a bucket on this rank.

    Attributes:
        names: Identities of its parameters, in order.
        bucket: Their shapes.
        method: What carries it.
        leaves: The state.
    """

    names: Sequence[Any]
    bucket: Bucket
    method: Method
    leaves: Leaves


def inherit(fresh: Kept, formers: Sequence[Kept]) -> dict[str, Any]:
    """Carry over to a new bucket what former buckets of the same rank kept of the same parameters.

    What is kept of each gradient, such as residuals and the factors of low-rank methods, is taken over parameter by
    parameter, counters from the first bucket of the same method, and all else by a bucket of the very same parameters
    alone (see `divisible`). The same on all ranks if it is called alike on all.

    Args:
        fresh: The new bucket with a new state.
        formers: Buckets of before.
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


def divisible(kept: Kept) -> bool:
    """Whether other buckets of the same parameters `inherit` all that this one keeps: nothing is lost."""
    return all(kind.per is Per.BUCKET or kind.per in _CUT for kind in _kinds(kept).values())


def _kinds(kept: Kept) -> dict[str, Kind]:
    return kinds(kept.method.init(NumpyOps(), kept.bucket, 1))


def _joined(path: str, per: Per, fresh: Kept, formers: Sequence[Kept]) -> Any:
    """Return a leaf with the pieces of all parameters that former buckets had."""
    vector, places = deepcopy(fresh.leaves[path]), _places(path, per, fresh)
    for former in formers:
        for name, place in _places(path, per, former).items():
            if name in places and _length(place) == _length(places[name]):
                vector[places[name]] = former.leaves[path][place]
    return vector


def _places(path: str, per: Per, kept: Kept) -> dict[Any, slice]:
    """Return where the pieces of the parameters are in a leaf that can be cut."""
    bucket = kept.bucket
    sizes = (
        bucket.sizes
        if per is Per.COORDINATE
        else [_alone(kept.method, shape, bucket.dtype)[path] for shape in bucket.shapes]
    )
    ends = accumulate(sizes)
    return {name: slice(end - size, end) for name, end, size in zip(kept.names, ends, sizes, strict=True)}


@cache
def _alone(method: Method, shape: Shape, dtype: str) -> dict[str, int]:
    """Return how long the leaves of a gradient are that has a bucket for itself."""
    state = method.init(NumpyOps(), Bucket("", (shape,), dtype), 1)
    return {path: np.size(leaf) for path, leaf in flatten(state).items()}


def _length(place: slice) -> int:
    return int(place.stop - place.start)
