"""States as flat, named leaves: what checkpoints hold."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, get_type_hints

import numpy as np

from hvd_compress.core.collectives import State
from hvd_compress.roles import Role


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


def roles(state: State, path: str = "", role: Role = Role.SHARED) -> dict[str, Role]:
    """Tell what the leaves of a state mean to the ranks, by the names that `flatten` gives them."""
    if not isinstance(state, tuple):
        return {path: role}
    found: dict[str, Role] = {}
    declared = _declared(type(state))
    for name, part in _children(state):
        found |= roles(part, f"{path}.{name}" if path else name, declared.get(name, Role.SHARED))
    return found


@cache
def _declared(kind: type) -> dict[str, Role]:
    """The roles in the annotations of a kind of state."""
    hints = get_type_hints(kind, include_extras=True) if hasattr(kind, "_fields") else {}
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: mark[0] for name, mark in marks.items() if mark and isinstance(mark[0], Role)}


def filled(like: State, leaves: Mapping[str, Any]) -> State:
    """Put numpy leaves into a state; where it has an int, they become one.

    Args:
        like: A state of the wanted structure.
        leaves: The leaves by name, which are copied.
    """
    kinds = flatten(like)
    new = {path: int(leaf) if isinstance(kinds[path], int) else np.array(leaf) for path, leaf in leaves.items()}
    return unflatten(like, new)


def residual_of(state: State) -> Any:
    """The residual in a state, however deep it is wrapped; None if there is none."""
    return next((leaf for path, leaf in flatten(state).items() if path.rpartition(".")[2] == "residual"), None)


def _children(state: tuple[Any, ...]) -> list[tuple[str, Any]]:
    names = getattr(state, "_fields", None) or map(str, range(len(state)))
    return list(zip(names, state, strict=True))
