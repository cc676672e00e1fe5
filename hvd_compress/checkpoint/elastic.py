"""Resharding when the ranks of an elastic job change.

Horovod does not tell a compressor which ranks are lost or new. So at the beginning of a step, each rank announces the
set of ranks that it exchanged with last. If the sets differ, states are resharded: survivors keep their own leaves, new
ranks start with empty ones, and leaves that must be equal on all ranks are copied from one survivor.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from hvd_compress.checkpoint import agreement, state_files
from hvd_compress.checkpoint.resharding import BucketSnapshot, Former, Leaves, needed_by_others, redistribute
from hvd_compress.core.collectives import World
from hvd_compress.core.state_tree import flatten, kinds
from hvd_compress.ops.numpy import NumpyOps

Gather: TypeAlias = Callable[[bytes, str], bytes]
"""Concatenates the bytes of all ranks, in the order of ranks, by a collective of the given name."""

_ROLL = struct.Struct("<5q")
_LENGTH = struct.Struct("<q")


class Roll(NamedTuple):
    """Announcement of a rank in a roll call.

    Attributes:
        token: Number of the set of ranks that it exchanged with last; 0 for a new rank.
        rank: Its rank in that set.
        size: Size of that set.
        label: Label of its parameters.
        steps: Number of its steps; lower than that of others if it aborted a step that they completed.
    """

    token: int
    rank: int
    size: int
    label: int
    steps: int


class Meeting(NamedTuple):
    """State to continue with after the ranks have changed.

    Attributes:
        steps: Number of steps so far.
        leaves: New states of all buckets; empty if all ranks are new.
        job: Job number that the ranks agreed on.
    """

    steps: int
    leaves: Mapping[str, Leaves]
    job: int


class Membership:
    """Set of ranks that a session exchanges with.

    Args:
        label: Number that identifies the parameters, the same on all ranks.
    """

    def __init__(self, label: int) -> None:
        self._roll = Roll(0, 0, 0, label, 0)

    def meet(
        self, world: World, steps: int, gather: Gather, facts: bytes, kept: Callable[[], Mapping[str, BucketSnapshot]]
    ) -> Meeting | None:
        """Compare the current ranks with those of the previous step, and reshard states if they differ.

        Args:
            world: The current ranks.
            steps: Number of this rank's steps.
            gather: Collective to communicate with.
            facts: Facts from `agreement.describe`.
            kept: Returns the states of all buckets; called only if needed.

        Returns:
            The state to continue with; None if the ranks are the same.

        Raises:
            DisagreementError: If a new rank has another model or other settings.
        """
        mine = self._roll._replace(steps=steps)
        rolls = [Roll(*row) for row in _ROLL.iter_unpack(gather(_ROLL.pack(*mine), "hvd_compress.roll"))]
        if rolls[0].token and rolls == [rolls[0]._replace(rank=rank, size=world.size) for rank in range(world.size)]:
            return None
        job = agreement.check(gather(facts, "hvd_compress.agreement"))
        first = max(rolls, key=lambda roll: roll.token)
        dealt = _dealt_out(kept(), rolls, world, gather) if first.token else {}
        self._roll = Roll(first.token + 1, world.rank, world.size, mine.label, 0)
        return Meeting(first.steps, dealt, job)


def _dealt_out(
    kept: Mapping[str, BucketSnapshot], rolls: list[Roll], world: World, gather: Gather
) -> dict[str, Leaves]:
    """Return the states of this rank, resharded from those of all survivors."""
    survivors = sorted((rank for rank, roll in enumerate(rolls) if roll.token), key=lambda rank: -rolls[rank].token)
    mine: dict[str, Leaves] = {}
    fresh = {key: k.method.init(NumpyOps(), k.bucket, world) for key, k in kept.items()}
    if world.rank in survivors:
        first = world.rank == survivors[0]
        mine = {key: needed_by_others(k.leaves, kinds(fresh[key]), first) for key, k in kept.items()}
    data = state_files.dump({f"{key}/{path}": leaf for key, ls in mine.items() for path, leaf in ls.items()}, {})
    others = [
        state_files.parse(part)[0] for part in _parts(gather(_LENGTH.pack(len(data)) + data, "hvd_compress.kept"))
    ]

    dealt: dict[str, Leaves] = {}
    for key, k in kept.items():
        formers = []
        for rank in survivors:
            theirs = {p.removeprefix(f"{key}/"): leaf for p, leaf in others[rank].items() if p.startswith(f"{key}/")}
            formers.append(Former(k.leaves if rank == world.rank else theirs, rolls[rank].rank, rank))
        known = kinds(fresh[key])
        size = rolls[survivors[0]].size
        dealt[key] = redistribute(flatten(fresh[key]), known, k.bucket.numel, formers, size, world)
    return dealt


def _parts(data: bytes) -> list[bytes]:
    """Split gathered bytes into parts, each preceded by its length."""
    parts, place = [], 0
    while place < len(data):
        (length,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size + length
        parts.append(data[place - length : place])
    return parts
