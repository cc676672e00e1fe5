"""Graphs of ranks that gossip: named ones, and those that users list edge by edge."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from hvd_compress.errors import SpecError

Pairs: TypeAlias = Sequence[tuple[int, int]]


class Edge(NamedTuple):
    """Two ranks that exchange their models.

    Attributes:
        low: The lower rank.
        high: The higher rank.
        weight: Share of the difference of their models by which each moves towards the other, in (0, 1).
    """

    low: int
    high: int
    weight: float

    def sign(self, rank: int) -> int:
        """Return the sign of a rank's model in the difference of both: 1 for the higher rank, -1 for the lower one."""
        return 1 if rank == self.high else -1


def _ring(size: int) -> Pairs:
    return [(rank, (rank + 1) % size) for rank in range(size)]


def _torus(size: int) -> Pairs:
    """Connect a grid whose sides are as equal as possible, and whose opposite sides meet."""
    width = next(one for one in range(math.isqrt(size), 0, -1) if size % one == 0)
    if width == 1:
        raise SpecError(
            f"graph='torus' is not allowed with {size} ranks, which are no grid of several rows and columns: take"
            " graph='ring' or 'exponential'"
        )
    across = [(rank, rank - rank % width + (rank + 1) % width) for rank in range(size)]
    return across + [(rank, (rank + width) % size) for rank in range(size)]


def _exponential(size: int) -> Pairs:
    """Connect ranks whose distance is a power of 2: Ying et al., Exponential Graph is Provably Efficient, 2021."""
    hops = [2**i for i in range((size - 1).bit_length())]
    found = {frozenset((rank, (rank + hop) % size)) for rank in range(size) for hop in hops}
    return [(min(pair), max(pair)) for pair in found]


GRAPHS: dict[str, Callable[[int], Pairs]] = {"ring": _ring, "torus": _torus, "exponential": _exponential}


def gossips(spec: str) -> bool:
    """Return whether a spec is ``NAME@GRAPH``."""
    return spec.rpartition("@")[2] in GRAPHS


def edges_of(graph: str | Pairs, size: int) -> list[Edge]:
    """Return the edges of a graph with Metropolis weights, ordered so that neighbours in the list share few ranks.

    An edge weighs ``m / (1 + d)``, where m is how often the graph has it and d the larger number of edges of its two
    ranks, so that models keep their mean. That is 1/3 in a ring and 1/5 in a torus; in one whose side is 2 long,
    neighbours along it are so twice.

    Args:
        graph: A key of `GRAPHS`, or pairs of ranks.
        size: Number of ranks; one alone has no edges.

    Raises:
        SpecError: If the name is unknown, or the pairs have a rank that does not exist, one paired with itself, a pair
            twice, or do not connect all ranks.
    """
    if isinstance(graph, str):
        if graph not in GRAPHS:
            raise SpecError(f"graph={graph!r} is not known; allowed: {', '.join(map(repr, GRAPHS))}, or pairs of ranks")
        pairs = GRAPHS[graph](size) if size > 1 else []
    else:
        pairs = _checked(graph, size)
    times = Counter((min(pair), max(pair)) for pair in pairs)
    degrees = Counter(rank for pair in pairs for rank in pair)
    edges = [Edge(low, high, m / (1 + max(degrees[low], degrees[high]))) for (low, high), m in sorted(times.items())]
    return _in_rounds(edges)


def _checked(pairs: Pairs, size: int) -> Pairs:
    seen: set[frozenset[int]] = set()
    for pair in pairs:
        try:
            one, other = map(operator.index, pair)
        except (TypeError, ValueError):
            raise SpecError(f"graph has {pair!r}, but an edge is a pair of ranks, such as (0, 1)") from None
        if not (0 <= one < size and 0 <= other < size):
            raise SpecError(f"graph has the edge {pair}, but the ranks are 0 to {size - 1}")
        if one == other:
            raise SpecError(f"graph has the edge {pair}: a rank does not gossip with itself, so leave it out")
        if frozenset(pair) in seen:
            raise SpecError(f"graph has the edge {pair} twice: an edge goes both ways, so give it once")
        seen.add(frozenset(pair))
    reached, new = set[int](), {0}
    while new:
        reached |= new
        new = {rank for pair in seen if pair & reached for rank in pair} - reached
    if missing := sorted(set(range(size)) - reached):
        raise SpecError(f"graph does not connect rank 0 with {missing}: their models would never agree; add an edge")
    return pairs


def _in_rounds(edges: list[Edge]) -> list[Edge]:
    """Order edges so that ranks which exchange one after another wait little: each round has a rank once at most."""
    found: list[Edge] = []
    while edges:
        busy: set[int] = set()
        left: list[Edge] = []
        for edge in edges:
            if busy & {edge.low, edge.high}:
                left.append(edge)
            else:
                found.append(edge)
                busy |= {edge.low, edge.high}
        edges = left
    return found
