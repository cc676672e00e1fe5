"""Whose are the arrays of a state? Answered by the annotations of its fields.

A state that is saved by one set of ranks and restored by another, or outlives a rank of an elastic job, has to be dealt
out anew. How, depends on what a leaf means, so each state says so: a field of one of the types below has that role, any
other field is `Role.SHARED`.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, TypeAlias


class Role(Enum):
    """What a leaf of a state means to the ranks."""

    SHARED = "equal on all ranks"
    OWN = "belongs to its rank; the sum over the ranks is what must not be lost"
    PRIVATE = "belongs to its rank; of no use to another"
    SERVED = "this rank's part of a vector over the whole bucket"
    TOTAL = "the sum of the OWN leaf beside it"
    PASSING = "means something to the very same ranks alone"


Own: TypeAlias = Annotated[Any, Role.OWN]
Private: TypeAlias = Annotated[Any, Role.PRIVATE]
Served: TypeAlias = Annotated[Any, Role.SERVED]
Total: TypeAlias = Annotated[Any, Role.TOTAL]
Passing: TypeAlias = Annotated[Any, Role.PASSING]
