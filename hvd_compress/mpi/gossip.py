"""Gossip of numpy arrays, over MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Unpack

from mpi4py import MPI

from hvd_compress.checkpoint.state_dict import Saved, SavedSession
from hvd_compress.core.bucketing import DEFAULT_MERGE
from hvd_compress.core.collectives import World
from hvd_compress.engine.spec import as_router
from hvd_compress.engine.stats import Meter, Stats
from hvd_compress.local.base import Over
from hvd_compress.local.gossip import GossipOptions, GossipSettings, GossipStepper
from hvd_compress.local.graph import Edge, Pairs
from hvd_compress.mpi.aggregator import Aggregator
from hvd_compress.mpi.stepper import ArrayStepper
from hvd_compress.mpi.transport import Arr, MPITransport


class Gossip(ArrayStepper, GossipStepper):
    """Train with neighbours only; see `hvd_compress.distributed.Gossip`.

    Use::

        gossip = Gossip({"w": w, "b": b}, "ring")
        for batch in batches:
            gossip.step()
            w -= lr * gradient(w, b, batch)  # in place, by any optimizer
        gossip.finish()

    Args:
        parameters: The parameters by name, which are changed in place.
        graph: ``"ring"``, ``"torus"``, ``"exponential"``, or pairs of ranks.
        comm: The ranks.
        **options: See `hvd_compress.local.gossip.GossipSettings`; ``compression`` is a spec.

    Raises:
        SpecError: If an option is unknown or its value is not allowed.
    """

    def __init__(
        self,
        parameters: Mapping[str, Arr],
        graph: str | Pairs = "ring",
        comm: MPI.Comm = MPI.COMM_WORLD,
        **options: Unpack[GossipOptions],
    ) -> None:
        chosen = GossipSettings.of(graph, options)
        self._parameters = dict(parameters)
        transport = MPITransport(comm)
        self._ends = _Ends(chosen.method, transport.world)
        super().__init__(chosen, self._ends, transport, "gossip")
        self._ends.connect(comm, self._mine)

    def _start(self, arrays: Sequence[Arr], edge: Edge) -> Over:
        means = self._ends.aggregators[edge].step(dict(zip(self._parameters, arrays, strict=True)))
        return Over([2 * means[key] for key in self._parameters])

    def close(self) -> None:
        """Free all communicators: on all ranks together, after the last step."""
        self._ends.close()
        assert isinstance(self._transport, MPITransport)
        self._transport.close()


class _Ends:
    """The compressions of this rank's edges, as one.

    Args:
        spec: The method.
        world: All ranks.

    Attributes:
        aggregators: By edge; none before `connect`.
    """

    def __init__(self, spec: str, world: World) -> None:
        self.method, self.merge, self._whole = as_router(spec), DEFAULT_MERGE, world
        self.aggregators: dict[Edge, Aggregator] = {}
        self._comms: list[MPI.Comm] = []

    def connect(self, comm: MPI.Comm, edges: Sequence[Edge]) -> None:
        """Make a communicator of both ranks of each edge, which all ranks have in the same order."""
        assert isinstance(comm, MPI.Intracomm)
        everyone = comm.Get_group()
        for edge in edges:
            self._comms.append(comm.Create_group(everyone.Incl(edge[:2])))
            self.aggregators[edge] = Aggregator(self.method, self._comms[-1])

    def close(self) -> None:
        for aggregator, comm in zip(self.aggregators.values(), self._comms, strict=True):
            aggregator.close()
            comm.Free()

    def stats(self) -> Stats:
        total = Meter()
        for one in fields(Meter):
            setattr(total, one.name, sum(getattr(a._meter, one.name) for a in self.aggregators.values()))
        return total.read(waits=True)

    def _world(self) -> World:
        return self._whole

    def _saved(self) -> Saved:
        sessions = {
            f"{edge.low}.{edge.high}.{label}": session._replace(process_set=edge[:2])
            for edge, aggregator in self.aggregators.items()
            for label, session in aggregator._saved().sessions.items()
        }
        return Saved(str(self.method), self._whole.rank, self._whole.size, sessions)

    def _load(self, saved: list[Saved]) -> None:
        for edge, aggregator in self.aggregators.items():
            place, prefix = aggregator._world(), f"{edge.low}.{edge.high}."
            aggregator._load([one._replace(rank=place.rank, size=2, sessions=_of(one, prefix)) for one in saved])


def _of(saved: Saved, prefix: str) -> dict[str, SavedSession]:
    """Return the sessions whose names begin so, without that."""
    return {name.removeprefix(prefix): one for name, one in saved.sessions.items() if name.startswith(prefix)}
