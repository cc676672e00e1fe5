"""Assignment of stages to ranks, and links between neighbouring stages."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from hvd_compress.core.method import check_range
from hvd_compress.errors import SpecError
from hvd_compress.pipeline.torch.end import Link

_PIPELINES = itertools.count()
"""Numbers of the pipelines of this process, made in the same order on all ranks; part of the names of messages."""


class Layout(NamedTuple):
    """Place of a rank in the pipeline.

    Attributes:
        rank: This process.
        ranks: How many processes there are.
        stages: How many stages the model has.
    """

    rank: int
    ranks: int
    stages: int

    @property
    def stage(self) -> int:
        """Stage of this rank."""
        return self.rank % self.stages

    @property
    def replica(self) -> int:
        """Replica of this rank."""
        return self.rank // self.stages

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return self.ranks // self.stages

    def neighbour(self, step: int) -> int | None:
        """Return the rank of the stage before (-1) or after (1); None if there is none."""
        return self.rank + step if 0 <= self.stage + step < self.stages else None

    def check(self) -> Layout:
        """Return this layout, after checking that the stages divide the ranks.

        Raises:
            SpecError: If they do not.
        """
        if self.stages < 1 or self.ranks % self.stages:
            raise SpecError(
                f"{self.stages} stages do not fit {self.ranks} ranks: run with as many ranks as stages, or with a"
                " multiple of that for several replicas"
            )
        return self


class Connection(NamedTuple):
    """Links of a rank to others.

    Attributes:
        layout: Where it is.
        back: Link to the stage before; None on the first.
        ahead: Link to the stage after; None on the last.
        replicas: Horovod's process set of the ranks with this stage; None if there is one replica.
    """

    layout: Layout
    back: Link | None
    ahead: Link | None
    replicas: Any


def connect(link: str, comm: Any, stages: int) -> Connection:
    """Connect the stages; to be called on all ranks.

    Args:
        link: ``"mpi"`` or ``"horovod"``.
        comm: Communicator for ``"mpi"``; None for the world.
        stages: How many there are.

    Raises:
        SpecError: If the link is not known, or the ranks do not suffice.
        MissingPackageError: If a package that the link needs is missing.
    """
    if link == "mpi":
        return _by_mpi(comm, stages)
    check_range("link", link, "'mpi' or 'horovod'", link == "horovod")
    if comm is not None:
        raise SpecError("comm= is only supported with link='mpi': with link='horovod' the ranks are those of Horovod")
    return _by_horovod(stages)


def _by_mpi(comm: Any, stages: int) -> Connection:
    from hvd_compress.pipeline.torch.mpi_link import Courier

    courier = Courier(comm)
    layout = Layout(courier.rank, courier.ranks, stages).check()
    back, ahead = (
        None if rank is None else courier.link(rank, layout.replica, _peer(layout, rank))
        for rank in (layout.neighbour(-1), layout.neighbour(1))
    )
    courier.start()
    return Connection(layout, back, ahead, _replicas(layout))


def _by_horovod(stages: int) -> Connection:
    from hvd_compress.pipeline.torch.horovod_link import HorovodLink, process_set, rank_and_size

    layout = Layout(*rank_and_size(), stages).check()
    links: dict[int, HorovodLink] = {}
    pipeline = next(_PIPELINES)
    for rank in range(layout.ranks - 1):
        if (rank + 1) % stages:  # otherwise the next rank belongs to the next replica
            pair = process_set([rank, rank + 1])
            if layout.rank in (rank, rank + 1):
                other = rank + 1 if layout.rank == rank else rank
                name = f"hvd_compress.pipeline{pipeline}.{rank}"
                links[other] = HorovodLink(pair, name, layout.rank == rank, _peer(layout, other))
    back, ahead = (None if rank is None else links[rank] for rank in (layout.neighbour(-1), layout.neighbour(1)))
    return Connection(layout, back, ahead, _replicas(layout))


def _replicas(layout: Layout) -> Any:
    if layout.replicas == 1:
        return None
    from hvd_compress.pipeline.torch.horovod_link import process_set

    sets = [process_set(list(range(stage, layout.ranks, layout.stages))) for stage in range(layout.stages)]
    return sets[layout.stage]


def _peer(layout: Layout, rank: int) -> str:
    return f"stage {rank % layout.stages} (rank {rank})"
