"""States as flat, named leaves, and what each leaf is: that stands in the annotations of their NamedTuples alone.

A state that is saved by one set of ranks and restored by another, outlives a rank of an elastic job, or goes on in
other buckets, has to be dealt out anew. How, depends on what a leaf is: a field of one of the types below is of that
kind, and so is all within it; any other is a number for the whole bucket, equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeAlias, get_type_hints

import numpy as np

from hvd_compress.core.collectives import State


class Role(Enum):
    """Ownership of a state leaf: which ranks hold it, and what it means to others."""

    SHARED = "equal on all ranks"
    MEASURED = "equal on all ranks, but for what their machines round in different ways"
    OWN = "belongs to its rank; the sum over the ranks is what must not be lost"
    PRIVATE = "belongs to its rank; of no use to another"
    SERVED = "this rank's part of what is whole over all ranks"
    TOTAL = "the sum of the OWN leaf beside it"
    PASSING = "means something to the very same ranks alone"


class Per(Enum):
    """Extent of a state leaf: one number per bucket, coordinate or gradient, or a part."""

    BUCKET = "a number for the bucket"
    COORDINATE = "a number for each coordinate of the bucket"
    GRADIENT = "for each gradient of the bucket a piece, as long as if it had a bucket for itself, one after another"
    PART = "for the part of the bucket that its rank serves"
    WHOLE = "for the bucket, not to be cut"


class Kind(NamedTuple):
    """Description of a state leaf.

    Attributes:
        role: Whose it is.
        per: How it is cut.
        residual: Whether it is what this rank has not sent yet, in the units of its gradient.
    """

    role: Role = Role.SHARED
    per: Per = Per.BUCKET
    residual: bool = False


Residual: TypeAlias = Annotated[Any, Kind(Role.OWN, Per.COORDINATE, residual=True)]
Own: TypeAlias = Annotated[Any, Kind(Role.OWN, Per.COORDINATE)]
Total: TypeAlias = Annotated[Any, Kind(Role.TOTAL, Per.COORDINATE)]
Passing: TypeAlias = Annotated[Any, Kind(Role.PASSING, Per.COORDINATE)]
Served: TypeAlias = Annotated[Any, Kind(Role.SERVED, Per.PART)]
Vector: TypeAlias = Annotated[Any, Kind(Role.SHARED, Per.COORDINATE)]
Factors: TypeAlias = Annotated[Any, Kind(Role.SHARED, Per.GRADIENT)]
Measurement: TypeAlias = Annotated[Any, Kind(Role.MEASURED)]
Private: TypeAlias = Annotated[Any, Kind(Role.PRIVATE)]
PrivateVector: TypeAlias = Annotated[Any, Kind(Role.PRIVATE, Per.COORDINATE)]
PrivateCode: TypeAlias = Annotated[Any, Kind(Role.PRIVATE, Per.WHOLE)]
ServedCode: TypeAlias = Annotated[Any, Kind(Role.PASSING, Per.PART)]


def flatten(state: State, path: str = "") -> dict[str, Any]:
    """Name the leaves of a state (arrays and ints), for example ``"inner.residual"``."""
    if not isinstance(state, tuple):
        return {path: state}
    leaves: dict[str, Any] = {}
    for name, part in _children(state):
        leaves |= flatten(part, f"{path}.{name}" if path else name)
    return leaves


def unflatten(like: State, leaves: Mapping[str, Any], path: str = "") -> State:
    """Undo `flatten`.

    Args:
        like: A state of the wanted structure; its own leaves are not used.
        leaves: The leaves by name.
        path: Prefix of the names.
    """
    if not isinstance(like, tuple):
        return leaves[path]
    parts = [unflatten(part, leaves, f"{path}.{name}" if path else name) for name, part in _children(like)]
    return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)


def kinds(state: State, path: str = "", kind: Kind = Kind()) -> dict[str, Kind]:  # noqa: B008
    """Tell what the leaves of a state are, by the names that `flatten` gives them."""
    if not isinstance(state, tuple):
        return {path: kind}
    found: dict[str, Kind] = {}
    declared = _declared(type(state))
    for name, part in _children(state):
        found |= kinds(part, f"{path}.{name}" if path else name, declared.get(name, kind))
    return found


@cache
def _declared(state: type) -> dict[str, Kind]:
    """Return the kinds in the annotations of a state."""
    hints = get_type_hints(state, include_extras=True) if hasattr(state, "_fields") else {}
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: mark[0] for name, mark in marks.items() if mark and isinstance(mark[0], Kind)}


def filled(like: State, leaves: Mapping[str, Any]) -> State:
    """Put numpy leaves into a state; where it has an int, they become one.

    Args:
        like: A state of the wanted structure.
        leaves: The leaves by name, which are copied.
    """
    before = flatten(like)
    new = {path: int(leaf) if isinstance(before[path], int) else np.array(leaf) for path, leaf in leaves.items()}
    return unflatten(like, new)


def residual_of(state: State) -> Any:
    """Return the residual in a state, however deep it is wrapped; None if there is none."""
    known = kinds(state)
    return next((leaf for path, leaf in flatten(state).items() if known[path].residual), None)


def _children(state: tuple[Any, ...]) -> list[tuple[str, Any]]:
    names = getattr(state, "_fields", None) or map(str, range(len(state)))
    return list(zip(names, state, strict=True))
