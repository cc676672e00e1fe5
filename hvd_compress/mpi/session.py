"""Buckets of an aggregator, with their states and exchanges."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_compress.checkpoint import agreement
from hvd_compress.checkpoint.resharding import BucketSnapshot
from hvd_compress.checkpoint.state_dict import SavedSession, fingerprint
from hvd_compress.core.bucketing import Gradient, Merge, Planned, advise, plan
from hvd_compress.core.collectives import Exchange, State
from hvd_compress.core.router import Routable
from hvd_compress.core.state_tree import filled, flatten, kinds, residual_of
from hvd_compress.engine.stats import Meter
from hvd_compress.mpi.transport import Arr, MPITransport
from hvd_compress.ops.numpy_compiled import NumpyCompiledOps
from hvd_compress.ops.totals import dense
from hvd_compress.transport.protocol import InFlight


class Session:
    """The buckets of a set of gradients, with this rank's states.

    Args:
        gradients: In the order in which the parameters are used.
        method: The method, as a router.
        merge: See `hvd_compress.core.bucketing.plan`.
        transport: Performs the collectives; making a session needs none.
        meter: Counts bytes and time.

    Attributes:
        label: Label of the gradients.
        states: One for each bucket.
        steps: Number of exchanges so far.
        job: Number of the ranks' agreement, or of the state that was restored.
    """

    def __init__(
        self, gradients: Sequence[Gradient], method: Routable, merge: Merge, transport: MPITransport, meter: Meter
    ) -> None:
        self.gradients = list(gradients)
        self.label = agreement.label(self.gradients)
        self.steps = self.job = 0
        self._transport = transport
        self._meter = meter
        self._ops = NumpyCompiledOps()
        advise(self.gradients, method, transport.world)
        self._plan = plan(self.gradients, method, merge)
        self.states: list[State] = [p.method.init(self._ops, p.bucket, transport.world) for p in self._plan]

    def exchange(self, arrays: Sequence[Arr]) -> list[Arr]:
        """Return the means of the gradients, in their shapes and dtypes; commit the new states if all are finite."""
        means = [np.empty_like(array) for array in arrays]
        states: list[State] = []
        for planned, state in zip(self._plan, self.states, strict=True):
            result = self._run(planned, arrays, state)
            states.append(result.state)
            with self._meter.time("decode"):
                mean = dense(self._ops, result.total) / self._transport.world.size
                pieces = self._ops.split(mean, planned.bucket.sizes)
                for i, piece in zip(planned.members, pieces, strict=True):
                    means[i][...] = piece.reshape(means[i].shape)
        if all(np.isfinite(mean).all() for mean in means):
            self.states = states
            self.steps += 1
        return means

    def _run(self, planned: Planned, arrays: Sequence[Arr], state: State) -> Exchange:
        bucket = planned.bucket
        with self._meter.time("encode"):
            x = np.concatenate([arrays[i].ravel() for i in planned.members]).astype(bucket.dtype)
            flight = InFlight(planned.method, self._ops, bucket, x, state, self._transport, "", self._meter.count)
        with self._meter.time("decode"):
            while flight.result is None:
                flight.go_on()
        return flight.ended

    def residual(self) -> dict[str, Arr]:
        """Return the residuals of this rank by gradient name."""
        kept: dict[str, Arr] = {}
        for planned, state in zip(self._plan, self.states, strict=True):
            residual = residual_of(state)
            if residual is not None:
                pieces = self._ops.split(residual, planned.bucket.sizes)
                for i, piece in zip(planned.members, pieces, strict=True):
                    kept[self.gradients[i].name] = piece.reshape(self.gradients[i].shape).copy()
        return kept

    def kept(self) -> dict[str, BucketSnapshot]:
        """The states of all buckets."""
        return {
            planned.bucket.key: BucketSnapshot(
                [self.gradients[i].name for i in planned.members], planned.bucket, planned.method, flatten(state)
            )
            for planned, state in zip(self._plan, self.states, strict=True)
        }

    def saved(self) -> SavedSession:
        """The states of all buckets, as copies."""
        kept = self.kept()
        buckets = {
            key: {path: leaf if isinstance(leaf, int) else np.array(leaf) for path, leaf in one.leaves.items()}
            for key, one in kept.items()
        }
        shared = fingerprint(buckets, dict(zip(kept, map(kinds, self.states), strict=True)))
        world = self._transport.world
        return SavedSession(
            world.rank,
            world.size,
            self.steps,
            buckets,
            job=self.job,
            shared=shared,
            local_size=world.local_size,
            gradients=self.gradients,
        )

    def restore(self, saved: SavedSession) -> None:
        """Take over states that have been checked."""
        self.steps, self.job = saved.steps, saved.job
        for number, planned in enumerate(self._plan):
            self.states[number] = filled(self.states[number], saved.buckets[planned.bucket.key])
