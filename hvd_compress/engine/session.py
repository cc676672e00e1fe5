"""The buckets of a list of gradients, with the states of one rank, for adapters that exchange a whole step at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.checkpoint import agreement
from hvd_compress.checkpoint.resharding import BucketSnapshot
from hvd_compress.checkpoint.state_dict import SavedSession, fingerprint
from hvd_compress.core.bucketing import Gradient, Planned
from hvd_compress.core.collectives import State, World
from hvd_compress.core.state_tree import Kind, filled, flatten, kinds, residual_of
from hvd_compress.engine.stats import Meter
from hvd_compress.engine.survey import Part
from hvd_compress.methods.wrappers.alternatives import Choice
from hvd_compress.ops import Ops
from hvd_compress.ops.totals import dense
from hvd_compress.transport.protocol import InFlight, Transport

Arr = npt.NDArray[Any]


class Session:
    """The buckets of a list of gradients, with the states of one rank.

    Args:
        gradients: In the order in which the parameters are used.
        planned: Their buckets, from `hvd_compress.core.bucketing.plan`.
        ops: Primitives to compute with; of numpy for `exchange`.
        world: The ranks that take part.

    Attributes:
        plan: The buckets.
        world: The ranks that take part.
        states: One state per bucket. Whoever exchanges sets those of a step that counts.
        steps: Number of steps so far, counted by whoever exchanges.
        job: Number of the ranks' agreement, or of the state that was restored; 0 before.
    """

    def __init__(self, gradients: Sequence[Gradient], planned: Sequence[Planned], ops: Ops, world: World) -> None:
        self._described = list(gradients)
        self.plan = list(planned)
        self.ops = ops
        self.world = world
        self.states = self.initial()
        self.steps = self.job = 0

    @property
    def gradients(self) -> Sequence[Gradient]:
        """The gradients, in order."""
        return self._described

    @property
    def label(self) -> str:
        """Label of the gradients, the same on all ranks."""
        return agreement.label(self._described)

    def initial(self) -> list[State]:
        """Return a new state for each bucket."""
        return [planned.method.init(self.ops, planned.bucket, self.world) for planned in self.plan]

    @staticmethod
    def merged(planned: Planned, arrays: Sequence[Arr]) -> Arr:
        """Return the gradients of a bucket as one new vector, in its dtype."""
        whole: Arr = np.concatenate([arrays[i].ravel() for i in planned.members])
        return whole.astype(planned.bucket.dtype, copy=False)

    def exchange(
        self, xs: Iterable[Arr], transport: Transport, meter: Meter, name: str = "", compensated: bool = False
    ) -> tuple[list[Arr], list[State]]:
        """Exchange bucket after bucket; no state of this session changes.

        Args:
            xs: One vector per bucket, which may be overwritten; drawn one by one, when their turn comes.
            transport: Performs the collectives.
            meter: Counts bytes and time.
            name: Prefix of the names of the collectives.
            compensated: Whether the vectors include the residuals.

        Returns:
            The sum over the ranks and the next state, of each bucket.

        Raises:
            ExchangeError: If a reply of another rank has the wrong length or contents.
        """
        totals, states, source = list[Arr](), list[State](), iter(xs)
        for planned, state in zip(self.plan, self.states, strict=True):
            bucket = planned.bucket
            with meter.time("encode"):
                x, key = next(source), f"{name}.{bucket.key}"
                flight = InFlight(
                    planned.method, self.ops, bucket, x, state, transport, key, meter.count, compensated=compensated
                )
                del x
            with meter.time("decode"):
                while flight.result is None:
                    flight.go_on()
                totals.append(dense(self.ops, flight.ended.total))
                states.append(flight.ended.state)
        return totals, states

    def choose(self, number: int) -> None:
        """Choose a candidate of ``auto`` for the exchanges to come."""
        for i, (planned, state) in enumerate(zip(self.plan, self.states, strict=True)):
            if isinstance(planned.method, Choice):
                self.states[i] = planned.method.choose(state, number)

    def parts(self, arrays: Sequence[Any]) -> list[Part]:
        """Return what a survey of candidates needs.

        Args:
            arrays: The gradients, in order.
        """
        return [
            Part(self.ops, one.bucket, one.method, [self.ops.constant(self._flat(one, arrays[i])) for i in one.members])
            for one in self.plan
            if isinstance(one.method, Choice)
        ]

    @staticmethod
    def _flat(planned: Planned, array: Any) -> Arr:
        """Return the gradient of a bucket as a vector in the bucket's dtype."""
        return np.asarray(array).ravel().astype(planned.bucket.dtype, copy=False)

    def pieces(self, vectors: Sequence[Arr | None]) -> list[Arr | None]:
        """Split a vector of each bucket into those of the gradients, in their shapes; None where there is none."""
        found: list[Arr | None] = [None] * len(self._described)
        for planned, vector in zip(self.plan, vectors, strict=True):
            if vector is not None:
                ends = np.cumsum(planned.bucket.sizes)
                for i, size, end in zip(planned.members, planned.bucket.sizes, ends, strict=True):
                    found[i] = vector[end - size : end].reshape(self._described[i].shape)
        return found

    def residual(self) -> dict[str, Arr]:
        """Return copies of this rank's residuals by gradient name; empty without error feedback."""
        residuals = [residual_of(state) for state in self.states]
        pieces = self.pieces([None if one is None else np.asarray(one) for one in residuals])
        named = zip(self._described, pieces, strict=True)
        return {one.name: piece.copy() for one, piece in named if piece is not None}

    def kinds(self) -> dict[str, dict[str, Kind]]:
        """Return the kinds of all leaves, by bucket and name."""
        return {planned.bucket.key: kinds(state) for planned, state in zip(self.plan, self.states, strict=True)}

    def kept(self, names: Sequence[Any] | None = None) -> list[BucketSnapshot]:
        """Return the states of all buckets, without copying them.

        Args:
            names: Identities of the gradients, in order; their names if left out.
        """
        known = [one.name for one in self._described] if names is None else names
        return [
            BucketSnapshot([known[i] for i in p.members], p.bucket, p.method, flatten(state))
            for p, state in zip(self.plan, self.states, strict=True)
        ]

    def by_bucket(self, saved: SavedSession | None = None) -> dict[str, BucketSnapshot]:
        """Return the states by the keys of the buckets."""
        del saved  # there is one partition only
        return {one.bucket.key: one for one in self.kept()}

    def saved(self) -> SavedSession:
        """Return copies of the states of all buckets, with what tells whose they are."""
        buckets = {
            one.bucket.key: {
                path: leaf if isinstance(leaf, int) else np.array(leaf) for path, leaf in one.leaves.items()
            }
            for one in self.kept()
        }
        return SavedSession(
            self.world.rank,
            self.world.size,
            self.steps,
            buckets,
            job=self.job,
            shared=fingerprint(buckets, self.kinds()),
            local_size=self.world.local_size,
            gradients=self.gradients,
        )

    def restore(self, saved: SavedSession) -> None:
        """Take over copies of states that have been checked."""
        self.steps, self.job = saved.steps, saved.job
        self.write(saved.buckets)

    def write(self, leaves: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the states of all buckets by copies of leaves, by bucket and name."""
        keys = [planned.bucket.key for planned in self.plan]
        self.states = [filled(like, leaves[key]) for key, like in zip(keys, self.states, strict=True)]
