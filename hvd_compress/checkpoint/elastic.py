"""Ranks that come and go, in an elastic job.

Horovod tells a compressor nothing of ranks that are lost or join, and a new rank cannot know what the others have gone
through. So at the beginning of a step (of each, where a driver cannot tell that Horovod was started anew) every rank
says which set of ranks it has exchanged with last. Where that is not the same set for all, states are dealt out anew:
survivors keep what is theirs, newcomers start clean, and what must be equal on all ranks is taken from one survivor.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from hvd_compress.checkpoint import agreement, state_files
from hvd_compress.checkpoint.resharding import Former, Kept, Leaves, needed_by_others, redistribute
from hvd_compress.core.collectives import World
from hvd_compress.core.state_tree import flatten, kinds
from hvd_compress.ops.numpy import NumpyOps

Gather: TypeAlias = Callable[[bytes, str], bytes]
"""Joins the bytes of all ranks, in the order of ranks, under a name."""

_ROLL = struct.Struct("<5q")
_LENGTH = struct.Struct("<q")


class Roll(NamedTuple):
    """What a rank answers in a roll call.

    Attributes:
        token: Number of the set of ranks that it has exchanged with last; 0 for a newcomer.
        rank: Its number in that set.
        size: How many they were.
        label: Of its parameters.
        steps: That it has done: fewer than others if it broke off a step which they could finish.
    """

    token: int
    rank: int
    size: int
    label: int
    steps: int


class Meeting(NamedTuple):
    """What a session goes on with where the ranks have changed.

    Attributes:
        steps: How many there have been.
        leaves: New states of all buckets; none where all ranks are new.
        job: The number that the ranks have agreed on.
    """

    steps: int
    leaves: Mapping[str, Leaves]
    job: int


class Membership:
    """The set of ranks that a session exchanges with.

    Args:
        label: A number that stands for its parameters, the same on all ranks.
    """

    def __init__(self, label: int) -> None:
        self._roll = Roll(0, 0, 0, label, 0)

    def meet(
        self, world: World, steps: int, gather: Gather, facts: bytes, kept: Callable[[], Mapping[str, Kept]]
    ) -> Meeting | None:
        """Find out whether the ranks are those of the step before.

        Args:
            world: This rank among those of now.
            steps: That it has done.
            gather: Communicates.
            facts: From `agreement.describe`.
            kept: Gives the states of all buckets; called if they are needed.

        Returns:
            None if they are.

        Raises:
            DisagreementError: If a newcomer is not set up as the others are.
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


def _dealt_out(kept: Mapping[str, Kept], rolls: list[Roll], world: World, gather: Gather) -> dict[str, Leaves]:
    """The states of this rank, made of those of all survivors."""
    survivors = sorted((rank for rank, roll in enumerate(rolls) if roll.token), key=lambda rank: -rolls[rank].token)
    mine: dict[str, Leaves] = {}
    fresh = {key: k.method.init(NumpyOps(), k.bucket, world.size) for key, k in kept.items()}
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
    """Cut what was gathered, each part with its length in front."""
    parts, place = [], 0
    while place < len(data):
        (length,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size + length
        parts.append(data[place - length : place])
    return parts
