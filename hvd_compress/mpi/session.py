"""What an aggregator is to one set of gradients: buckets, their states, and the exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvd_compress.collectives import Exchange, State, take_branches
from hvd_compress.errors import StateError
from hvd_compress.merging import Gradient, Merge, Planned, plan
from hvd_compress.methods.base import Method
from hvd_compress.mpi.driver import Arr, Driver
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.state import flatten, residual_of, unflatten
from hvd_compress.stats import Meter, Phase


class Session:
    """The buckets of a set of gradients, with this rank's states.

    Args:
        gradients: In the order in which the parameters are used.
        method: What compresses.
        merge: See `hvd_compress.merging.plan`.
        driver: Performs the collectives; making a session needs none.
        meter: Counts bytes and time.

    Attributes:
        states: One for each bucket.
    """

    def __init__(
        self, gradients: Sequence[Gradient], method: Method, merge: Merge, driver: Driver, meter: Meter
    ) -> None:
        self.gradients = list(gradients)
        self._driver = driver
        self._meter = meter
        self._ops = NumpyOps()
        self._plan = plan(self.gradients, method, merge)
        self.states: list[State] = [p.method.init(self._ops, p.bucket, driver.world.size) for p in self._plan]

    def exchange(self, arrays: Sequence[Arr]) -> list[Arr]:
        """Give the means of the gradients, in their shapes and dtypes, and take over the new states."""
        means = [np.empty_like(array) for array in arrays]
        states: list[State] = []
        for planned, state in zip(self._plan, self.states, strict=True):
            result = self._run(planned, arrays, state)
            states.append(result.state)
            with self._meter.time("decode"):
                pieces = self._ops.split(result.total / self._driver.world.size, planned.bucket.sizes)
                for i, piece in zip(planned.members, pieces, strict=True):
                    means[i][...] = piece.reshape(means[i].shape)
        self.states = states
        return means

    def _run(self, planned: Planned, arrays: Sequence[Arr], state: State) -> Exchange:
        bucket, phase, reply = planned.bucket, _ENCODE, None
        with self._meter.time(phase):
            x = np.concatenate([arrays[i].ravel() for i in planned.members]).astype(bucket.dtype)
            running = take_branches(planned.method.exchange(self._ops, bucket, x, state, self._driver.world))
        while True:
            with self._meter.time(phase):
                try:
                    message = running.send(reply)
                except StopIteration as end:
                    result: Exchange = end.value
                    return result
            self._meter.bytes_sent += message.array.nbytes
            with self._meter.time("wait"):
                reply = self._driver.perform(message)
            phase = _DECODE

    def residual(self) -> dict[str, Arr]:
        """What this rank has kept back, by gradient name."""
        kept: dict[str, Arr] = {}
        for planned, state in zip(self._plan, self.states, strict=True):
            residual = residual_of(state)
            if residual is not None:
                pieces = self._ops.split(residual, planned.bucket.sizes)
                for i, piece in zip(planned.members, pieces, strict=True):
                    kept[self.gradients[i].name] = piece.reshape(self.gradients[i].shape).copy()
        return kept

    def state_dict(self) -> dict[str, Any]:
        """The gradients, and the states of all buckets as copies."""
        return {
            "parameters": _facts(self.gradients),
            "buckets": {
                planned.bucket.key: {
                    path: leaf if isinstance(leaf, int) else np.array(leaf) for path, leaf in flatten(state).items()
                }
                for planned, state in zip(self._plan, self.states, strict=True)
            },
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over saved states, all or none.

        Raises:
            StateError: If they are of another model or do not fit its buckets.
        """
        if saved.get("parameters") != _facts(self.gradients):
            raise StateError(
                f"this state is of a model with the gradients {saved.get('parameters')}, and here they are"
                f" {_facts(self.gradients)}: restore with the model that was saved"
            )
        buckets = saved["buckets"]
        if set(buckets) != {planned.bucket.key for planned in self._plan}:
            raise StateError(
                f"the saved buckets {sorted(buckets)} do not fit: there are {len(self._plan)} of them here"
            )
        self.states = [
            _restored(planned.bucket.key, state, buckets[planned.bucket.key])
            for planned, state in zip(self._plan, self.states, strict=True)
        ]


_ENCODE: Phase = "encode"
_DECODE: Phase = "decode"


def _facts(gradients: Sequence[Gradient]) -> list[list[Any]]:
    return [[g.name, list(g.shape), g.dtype] for g in gradients]


def _restored(key: str, like: State, saved: Mapping[str, Any]) -> State:
    """Build the state of a bucket from saved leaves, which must look like those that it has."""
    leaves: dict[str, Any] = {}
    for path, leaf in flatten(like).items():
        old, new = np.asarray(leaf), np.asarray(saved.get(path))
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise StateError(
                f"{path!r} of bucket {key!r} does not fit: expected shape {old.shape} and {old.dtype}, got shape"
                f" {new.shape} and {new.dtype}"
            )
        leaves[path] = int(new) if isinstance(leaf, int) else new.copy()
    return unflatten(like, leaves)
