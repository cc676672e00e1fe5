"""States as flat, named leaves, and the kind of each leaf.

Saved states, elastic jobs and changed buckets need resharding, and the kind of a leaf says how. Annotations of the
state's NamedTuple declare it: a field of one of the types below has that kind, including everything nested in it. Other
fields are one number per bucket, equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeAlias, get_type_hints

import numpy as np

from hvd_compress.core.collectives import State


class Role(Enum):
    """Ownership of a state leaf."""

    SHARED = "equal on all ranks"
    MEASURED = "equal on all ranks up to rounding"
    OWN = "per rank; resharding preserves the sum over the ranks"
    PRIVATE = "per rank; useless to other ranks"
    SERVED = "this rank's shard of a vector"
    TOTAL = "sum over the ranks of the OWN leaf beside it"
    PASSING = "valid for the same set of ranks only"


class Per(Enum):
    """Extent of a state leaf."""

    BUCKET = "one number per bucket"
    COORDINATE = "one number per coordinate of the bucket"
    GRADIENT = "one piece per gradient, concatenated; each is as long as in a bucket of its own"
    PART = "one number per coordinate of the shard that the rank serves"
    WHOLE = "the whole bucket; cannot be split"


class Kind(NamedTuple):
    """Description of a state leaf.

    Attributes:
        role: Ownership.
        per: Extent.
        residual: Whether it is the residual, in the units of the gradient.
        within: Extent in the part of the bucket that this rank has of its node's; None if it is of the bucket.
    """

    role: Role = Role.SHARED
    per: Per = Per.BUCKET
    residual: bool = False
    within: Per | None = None


Residual: TypeAlias = Annotated[Any, Kind(Role.OWN, Per.COORDINATE, residual=True)]
Own: TypeAlias = Annotated[Any, Kind(Role.OWN, Per.COORDINATE)]
Total: TypeAlias = Annotated[Any, Kind(Role.TOTAL, Per.COORDINATE)]
PerWorld: TypeAlias = Annotated[Any, Kind(Role.PASSING, Per.COORDINATE)]
ServerShard: TypeAlias = Annotated[Any, Kind(Role.SERVED, Per.PART)]
Vector: TypeAlias = Annotated[Any, Kind(Role.SHARED, Per.COORDINATE)]
Factors: TypeAlias = Annotated[Any, Kind(Role.SHARED, Per.GRADIENT)]
Measurement: TypeAlias = Annotated[Any, Kind(Role.MEASURED)]
Private: TypeAlias = Annotated[Any, Kind(Role.PRIVATE)]
PrivateVector: TypeAlias = Annotated[Any, Kind(Role.PRIVATE, Per.COORDINATE)]
PrivateFactors: TypeAlias = Annotated[Any, Kind(Role.PRIVATE, Per.GRADIENT)]
PrivateCode: TypeAlias = Annotated[Any, Kind(Role.PRIVATE, Per.WHOLE)]
ServedCode: TypeAlias = Annotated[Any, Kind(Role.PASSING, Per.PART)]

OF_PART = Kind(Role.PASSING, Per.WHOLE, within=Per.WHOLE)
NodePart: TypeAlias = Annotated[Any, OF_PART]
"""State of a method that has a part of the bucket: of its leaves, only counters can be resharded."""


def flatten(state: State, path: str = "") -> dict[str, Any]:
    """Return the leaves of a state (arrays and ints) by name, for example ``"inner.residual"``."""
    if not isinstance(state, tuple):
        return {path: state}
    leaves: dict[str, Any] = {}
    for name, part in _children(state):
        leaves |= flatten(part, f"{path}.{name}" if path else name)
    return leaves


def unflatten(like: State, leaves: Mapping[str, Any], path: str = "") -> State:
    """Undo `flatten`.

    Args:
        like: A state with the same structure; its leaves are ignored.
        leaves: The leaves by name.
        path: Prefix of the names.
    """
    if not isinstance(like, tuple):
        return leaves[path]
    parts = [unflatten(part, leaves, f"{path}.{name}" if path else name) for name, part in _children(like)]
    return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)


def kinds(state: State, path: str = "", kind: Kind = Kind()) -> dict[str, Kind]:  # noqa: B008
    """Return the kinds of the leaves of a state, by the names of `flatten`."""
    if not isinstance(state, tuple):
        return {path: kind}
    found: dict[str, Kind] = {}
    declared = _declared(type(state))
    for name, part in _children(state):
        mine, at = declared.get(name, kind), f"{path}.{name}" if path else name
        if mine == OF_PART:
            inner = kinds(part, at).items()
            found |= {leaf: one if one == Kind() else OF_PART._replace(within=one.per) for leaf, one in inner}
        else:
            found |= kinds(part, at, mine)
    return found


@cache
def _declared(state: type) -> dict[str, Kind]:
    """Return the kinds that the annotations of a state declare."""
    hints = get_type_hints(state, include_extras=True) if hasattr(state, "_fields") else {}
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: mark[0] for name, mark in marks.items() if mark and isinstance(mark[0], Kind)}


def filled(like: State, leaves: Mapping[str, Any]) -> State:
    """Build a state from copies of numpy leaves; leaves that are ints in ``like`` become ints.

    Args:
        like: A state with the same structure.
        leaves: The leaves by name.
    """
    before = flatten(like)
    new = {path: int(leaf) if isinstance(before[path], int) else np.array(leaf) for path, leaf in leaves.items()}
    return unflatten(like, new)


def residual_of(state: State) -> Any:
    """Return the residual in a state, also within nested states; None if there is none."""
    known = kinds(state)
    return next((leaf for path, leaf in flatten(state).items() if known[path].residual), None)


def _children(state: tuple[Any, ...]) -> list[tuple[str, Any]]:
    names = getattr(state, "_fields", None) or map(str, range(len(state)))
    return list(zip(names, state, strict=True))
