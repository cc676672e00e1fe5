"""Gossip: the models of neighbours in a graph of ranks approach each other in each step."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Self, TypedDict

import numpy as np

from hvd_compress.checkpoint.state_dict import SavedSession
from hvd_compress.core.collectives import AllReduce
from hvd_compress.core.method import Method, Wrapper, check_range, check_whole
from hvd_compress.core.router import Router
from hvd_compress.errors import SpecError, StateError
from hvd_compress.local.base import Flight, Stepper
from hvd_compress.local.graph import Edge, Pairs, edges_of
from hvd_compress.methods.wrappers.error_feedback import EF21
from hvd_compress.transport.protocol import Transport

_LOG = logging.getLogger("hvd_compress")


class GossipOptions(TypedDict, total=False):
    """Keyword arguments of `GossipSettings`, but for the graph."""

    rank: int
    iterations: int
    compression: Any
    step_size: float


@dataclass(frozen=True, kw_only=True)
class GossipSettings:
    """Settings of gossip.

    Args:
        graph: ``"ring"``, ``"torus"``, ``"exponential"``, or pairs of ranks.
        rank: Rank of the differences that PowerGossip sends, at least 1.
        iterations: Exchanges in each step, at least 1.
        compression: Another compression than PowerGossip: a spec, or a compression object. ``"none"`` sends the models
            as they are (D-PSGD); any other one has ``feedback=ef21``, which makes it CHOCO-SGD.
        step_size: Factor of the weights of the graph, above 0; CHOCO-SGD needs less than 1 if it sends little.
    """

    graph: str | Pairs = "ring"
    rank: int = 1
    iterations: int = 1
    compression: Any = ""
    step_size: float = 1.0

    def __post_init__(self) -> None:
        check_whole("rank", self.rank, 1, 2**16)
        check_whole("iterations", self.iterations, 1, 1000)
        check_range("step_size", self.step_size, "above 0 and at most 2", 0 < self.step_size <= 2)
        if self.compression and self.rank != 1:
            raise SpecError(f"rank={self.rank} has no effect with compression={self.compression!r}: leave it out")

    @classmethod
    def of(cls, graph: str | Pairs, options: GossipOptions) -> Self:
        """Return settings.

        Args:
            graph: A graph, or ``SPEC@GRAPH`` with the spec of a compression, or of PowerGossip: ``powergossip:rank=2``.
            options: The other settings.

        Raises:
            SpecError: If an option is unknown or its value is not allowed.
        """
        check_options("Gossip", options, [one.name for one in fields(cls)])
        if not isinstance(graph, str):
            check_range("graph", str(graph), "a name, or a list of pairs of ranks", isinstance(graph, Sequence))
            return cls(graph=tuple(graph), **options)
        spec, _, name = graph.rpartition("@")
        power, colon, rank = spec.partition(":rank=")
        if power.startswith("powergossip"):
            if power != "powergossip" or (colon and not rank.isdigit()):
                raise SpecError(f"{graph!r} is not allowed: write powergossip:rank=2@ring, or powergossip@ring")
            options = {"rank": int(rank) if colon and "compression" not in options else 1, **options}
        elif spec:
            options = {"compression": spec, **options}
        return cls(graph=name, **options)

    @property
    def method(self) -> Any:
        """The compression of what two ranks exchange.

        PowerGossip is ACP-SGD of their difference, without error feedback: what is not sent stays in the difference.
        """
        return self.compression or f"acpsgd:rank={self.rank},min_gain=0,min_size=0,feedback=off"


class GossipStepper(Stepper):
    """Lets the models of neighbours approach each other: the base class of the adapters' `Gossip`.

    With x_i the model of rank i, w_ij the weight of an edge, g the step size and C what two ranks get to know of the
    difference of their models::

        x_i = x_i + g sum_j w_ij C(x_j - x_i)

    Both ends of an edge exchange a compressed sum, of the higher rank's model and the lower one's negative. So they
    have the same difference bit for bit, and the mean over all ranks is kept.

    Args:
        settings: The settings.
        compression: Compresses the sums of two ranks.
        transport: Transport of all ranks.
        label: See `Stepper`.
        members: See `Stepper`.

    Raises:
        SpecError: If the graph or the compression is not allowed.
    """

    _kind = "gossip"
    _before = True
    settings: GossipSettings

    def __init__(
        self, settings: GossipSettings, compression: Any, transport: Transport, label: str, members: Sequence[int] = ()
    ) -> None:
        check_compression(compression.method)
        self.edges = edges_of(settings.graph, transport.world.size)
        self._mine = [edge for edge in self.edges if transport.world.rank in (edge.low, edge.high)]
        super().__init__(settings, compression, transport, label, members)
        self._steps = 0
        self._warned = False

    @abstractmethod
    def _start(self, arrays: Sequence[Any], edge: Edge) -> Flight:
        """Start to sum arrays, which are not needed any more, over both ranks of an edge."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(step={self._steps}, {self.settings!r})"

    def _step(self) -> None:
        self._steps += 1  # before the first step of the optimizer, all models are equal still
        if self._steps > 1:
            for _ in range(self.settings.iterations):
                self._mix()

    def _mix(self) -> None:
        rank, arrays = self._transport.world.rank, self._arrays()
        flights = [(edge, self._start([edge.sign(rank) * one for one in arrays], edge)) for edge in self._mine]
        for edge, flight in flights:
            differences = flight.wait()
            if not self._finite(differences):
                self._warn(edge)
                continue
            share = -edge.sign(rank) * self.settings.step_size * edge.weight
            arrays = [one + share * difference for one, difference in zip(arrays, differences, strict=True)]
        self._write(range(len(arrays)), arrays)

    def _warn(self, edge: Edge) -> None:
        if not self._warned:
            self._warned = True
            _LOG.warning(
                "the parameters of rank %d or %d are not finite in step %d: as long as that is so, they do not gossip"
                " with each other",
                edge.low,
                edge.high,
                self._steps,
            )

    def _mean(self) -> list[Any]:
        """Return the mean of the models of all ranks."""
        size = self._transport.world.size
        arrays = [self._array(self._numpy(one)) for one in self._arrays()]  # 16 bits as 32, where numpy has none
        return [self._perform(AllReduce(one), f"mean.{i}") / size for i, one in enumerate(arrays)]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the mean of all models in the place of this rank's parameters within the context, as for evaluation.

        All ranks enter it together.
        """
        with self._in_place(self._mean()):
            yield

    def finish(self) -> None:
        """Give all ranks the mean of their models; see `Stepper.finish`."""
        self._write(range(len(self._arrays())), self._mean())

    def _kept(self) -> tuple[int, dict[str, Any]]:
        return self._steps, {"edges": self._array(self._pairs_of_ranks())}

    def _pairs_of_ranks(self) -> Any:
        """Return the ranks of all edges, int64, shape ``(edges, 2)``."""
        return np.array([edge[:2] for edge in self.edges], np.int64).reshape(-1, 2)

    def _check(self, saved: SavedSession) -> None:
        size = self._transport.world.size
        if saved.size != size:
            raise StateError(
                f"the loaded state of gossip is one of {saved.size} ranks, but there are {size}, with other neighbours:"
                " resume on as many, or load the mean of the models only, which averaged() gives"
            )
        if not np.array_equal(saved.buckets[""].get("edges", ()), self._pairs_of_ranks()):
            raise StateError(f"the loaded state of gossip is of another graph than {self.settings.graph!r}")

    def _restore(self, saved: SavedSession) -> None:
        self._steps = saved.steps


def check_options(name: str, options: Iterable[str], known: Sequence[str]) -> None:
    """Refuse unknown keyword arguments.

    Raises:
        SpecError: If there is one; the message starts with ``name``.
    """
    if unknown := sorted(set(options) - set(known)):
        raise SpecError(f"{name} has no option {unknown[0]!r}; it has: {', '.join(known)}")


def check_compression(router: Router) -> None:
    """Refuse a compression that does not get to know the difference of two models.

    Raises:
        SpecError: If it is one.
    """
    method: Method = router.core
    if method.name == "none" or method.family == "low-rank":  # without wrappers, which have no name
        return
    while isinstance(method, Wrapper):
        if isinstance(method, EF21):
            return
        method = method.inner
    raise SpecError(
        f"compression={str(router)!r} is not allowed in gossip, as it would send models but not their differences: add"
        " feedback=ef21, or take 'none', or leave it out for PowerGossip"
    )
