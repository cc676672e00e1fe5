"""Placement of ranks on nodes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from hvd_compress.core.collectives import World
from hvd_compress.errors import UnsupportedError
from hvd_compress.transport.protocol import TrainingTransport

_LOG = logging.getLogger("hvd_compress")

_VARIABLES = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
"""Variables that launchers set: torchrun, horovodrun and mpirun of Open MPI."""


def connects(transport: TrainingTransport) -> bool:
    """Connect the ranks within nodes and across nodes, if there are such and Horovod has been started for it.

    All ranks call it at the same time, once they know that nodes have as many ranks each.

    Returns:
        Whether they are connected: the same on all ranks.
    """
    if not transport.world.multilevel:
        return False
    try:
        transport.connect()
    except UnsupportedError as error:
        if transport.world.rank == 0:
            _LOG.info("auto leaves out candidates with hierarchical=on: %s", error)
        return False
    return True


def placed(ranks: Sequence[int], rank: int, local_rank: int, local_size: int) -> World:
    """Return the world of a process among some ranks of a job.

    Args:
        ranks: Global ranks that take part, ascending.
        rank: Global rank of this process.
        local_rank: Its rank within its node.
        local_size: Number of ranks on its node.
    """
    here, size = ranks.index(rank), len(ranks)
    if local_size < 1 or rank % local_size != local_rank:
        return World(here, size, even=False)
    members = Counter(one // local_size for one in ranks)
    each = members[rank // local_size]
    even = all(count == each for count in members.values())
    return World(here, size, each if even else 1, even)


def launched(ranks: Sequence[int], rank: int, variables: Mapping[str, str]) -> World:
    """Return the world of a process, given the environment variables of its launcher; see `placed`."""
    for local_rank, local_size in _VARIABLES:
        if local_rank in variables and local_size in variables:
            return placed(ranks, rank, int(variables[local_rank]), int(variables[local_size]))
    return World(ranks.index(rank), len(ranks), even=False)
