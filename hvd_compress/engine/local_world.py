"""`LocalWorld`: all ranks in one process, in numpy, without Horovod; for tests and simulations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_compress.core.bucketing import DEFAULT_MERGE, Gradient, Merge, advise, gradient, plan
from hvd_compress.core.collectives import AllReduce, Collective, State, World
from hvd_compress.core.router import Routable
from hvd_compress.engine.race import PROBES, Race, Stage
from hvd_compress.engine.session import Session
from hvd_compress.engine.spec import as_router
from hvd_compress.engine.survey import survey
from hvd_compress.errors import ExchangeError, GradientError
from hvd_compress.methods.wrappers.router import Auto
from hvd_compress.ops import Ops
from hvd_compress.ops.numpy import NumpyOps
from hvd_compress.transport.lockstep import lockstep, worlds
from hvd_compress.transport.lowering import LACKS

Arr = npt.NDArray[Any]


class LocalWorld:
    """Simulation of several ranks in one process.

    A dict of named gradients is treated as a model: policies choose the compressed gradients, which are merged into
    buckets. A bare array is always compressed as a whole.

    Example:
        >>> import numpy as np
        >>> world = LocalWorld("topk:ratio=0.5", size=2)
        >>> world.step([np.array([1.0, 8.0]), np.array([4.0, 0.0])])[0]
        array([2., 4.])

    Args:
        method: A method, a router, or a spec string.
        size: Number of ranks.
        merge: See `hvd_compress.core.bucketing.plan`.
        ops: Primitives to compute with, of any framework; numpy by default.
        local_size: Number of ranks on each node.
        clock: Returns the time in seconds, by which ``auto`` chooses; a simulated one may count `bytes_sent`.

    Attributes:
        race: The race of the candidates, with ``auto``; else None.
        bytes_sent: Payload bytes that one rank has passed to collectives so far, including metadata.
        bytes_across: Payload bytes of collectives between nodes only.
        rounds: Number of collectives so far.
        steps: Number of steps so far, without those with a non-finite gradient or sum.

    Raises:
        ExchangeError: If ``local_size`` does not divide ``size``, or one of them is below 1.
    """

    def __init__(
        self,
        method: Routable | str,
        size: int,
        merge: Merge = DEFAULT_MERGE,
        ops: Ops | None = None,
        local_size: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if size < 1:
            raise ExchangeError(f"size={size} is not allowed: a world has at least 1 rank")
        if local_size < 1 or size % local_size:
            raise ExchangeError(f"local_size={local_size} is not allowed: it must divide size={size}")
        self.method = as_router(method)
        self.size = size
        self.local_size = local_size
        self.merge = merge
        self.bytes_sent = self.bytes_across = self.rounds = self.steps = 0
        self._ops: Ops = NumpyOps() if ops is None else ops
        self._gradients: list[Gradient] | None = None
        self._sessions: list[Session] = []
        self.race = Race(self.method, adam=True, size=size) if isinstance(self.method, Auto) else None
        if self.race is not None:
            self.race.place(World(0, size, local_size).multilevel)
        self._clock, self._ended = clock, clock()

    def step(self, grads: Any) -> Any:
        """Exchange one gradient per rank.

        Args:
            grads: A sequence with one array per rank, or a mapping from names to such sequences. Names, shapes and
                dtypes (float16, float32 or float64) must be the same in each step.

        Returns:
            The compressed mean over the ranks, as each rank receives it: a list of one array per rank, or a mapping
            from names to such lists. If any input is not finite, all results are nan. If any input or sum is not
            finite, no state changes.

        Raises:
            GradientError: If names, shapes or dtypes differ between ranks or steps, or a dtype is not supported.
            ExchangeError: If a collective fails; no state changes.
        """
        named: dict[str, Sequence[Any]] = dict(grads) if isinstance(grads, Mapping) else {"": list(grads)}
        if any(isinstance(one, Mapping) for arrays in named.values() for one in arrays):
            raise GradientError("pass gradients by name as {name: [array of rank 0, array of rank 1, ...]}")
        ranks = [[np.asarray(arrays[rank]) for arrays in self._checked(named)] for rank in range(self.size)]
        self._prepare(list(named), ranks[0], whole=not isinstance(grads, Mapping))

        finite = all(np.isfinite(array).all() for arrays in ranks for array in arrays)
        if not finite:
            means = [[np.full_like(array, np.nan) for array in arrays] for arrays in ranks]
        else:
            if self.race is not None:
                self._choose(self.race, ranks[0])
            means, states = self._exchange(ranks)
            if all(np.isfinite(array).all() for arrays in means for array in arrays):
                for session, new in zip(self._sessions, states, strict=True):
                    session.states = new
                self.steps += 1
                if self.race is not None:
                    self._record(self.race)
        if not isinstance(grads, Mapping):
            return [arrays[0] for arrays in means]
        return {name: [arrays[i] for arrays in means] for i, name in enumerate(named)}

    def _choose(self, race: Race, arrays: Sequence[Arr]) -> None:
        """Choose the candidate of a step, after a survey of the gradients of rank 0 if it is asked for."""
        for session in self._sessions:
            session.choose(race.choice)
        if race.asks is Stage.SURVEY:
            session = self._sessions[0]
            race.facts = survey(session.parts(arrays), race.surveyed, session.world, LACKS, self._clock)

    def _record(self, race: Race) -> None:
        """Tell the race the time of a step, and that of the collectives that it asks for."""
        now = self._clock()
        told = race.record(now - self._ended)
        if told is not None:
            race.decide(told)
        if race.asks is Stage.PROBE:
            times = [self._clock()]
            for nbytes in PROBES:
                self._count(AllReduce(np.zeros(nbytes // 4, np.float32)))
                times.append(self._clock())
            race.decide([times[1] - times[0], times[2] - times[1]])
        self._ended = self._clock()

    def residual(self, rank: int) -> dict[str, Arr]:
        """Return a rank's residuals by gradient name (``""`` for a bare array); empty without error feedback."""
        return self._sessions[rank].residual() if self._sessions else {}

    def _checked(self, named: dict[str, Sequence[Any]]) -> list[Sequence[Any]]:
        for name, arrays in named.items():
            facts = {(np.shape(array), np.asarray(array).dtype.name) for array in arrays}
            if len(arrays) != self.size or len(facts) != 1:
                raise GradientError(
                    f"gradient {name!r}: expected one array per rank ({self.size}), of equal shape and dtype;"
                    f" got {len(arrays)} with {sorted(facts)}"
                )
        return list(named.values())

    def _prepare(self, names: list[str], arrays: list[Arr], whole: bool) -> None:
        gradients = [gradient(name, a.shape, a.dtype.name) for name, a in zip(names, arrays, strict=True)]
        if self._gradients is None:
            method = self.method.core if whole else self.method
            advise(gradients, method, World(0, self.size, self.local_size))
            planned = plan(gradients, method, self.merge)
            everyone = worlds(self.size, self.local_size)
            self._sessions = [Session(gradients, planned, self._ops, world) for world in everyone]
            self._gradients = gradients
        elif gradients != self._gradients:
            raise GradientError(
                f"the gradients have changed from {self._gradients} to {gradients}: pass the same names, shapes and"
                " dtypes in each step, or make a new LocalWorld"
            )

    def _exchange(self, ranks: list[list[Arr]]) -> tuple[list[list[Arr]], list[list[State]]]:
        """Return the means and the new states of all ranks."""
        totals: list[list[Arr]] = [[] for _ in ranks]
        after: list[list[State]] = [[] for _ in ranks]
        for number, (bucket, method, _) in enumerate(self._sessions[0].plan):
            xs = [one.merged(one.plan[number], arrays) for one, arrays in zip(self._sessions, ranks, strict=True)]
            states = [one.states[number] for one in self._sessions]
            results = lockstep(self._ops, method, bucket, xs, states, self._count, self.local_size)
            for rank, result in enumerate(results):
                totals[rank].append(np.asarray(result.total) / self.size)
                after[rank].append(result.state)
        pieces = [one.pieces(mine) for one, mine in zip(self._sessions, totals, strict=True)]
        means = [
            [
                np.full_like(a, np.nan) if piece is None else piece.astype(a.dtype)
                for piece, a in zip(*pair, strict=True)
            ]
            for pair in zip(pieces, ranks, strict=True)
        ]
        return means, after

    def _count(self, message: Collective) -> None:
        self.rounds += 1
        self.bytes_sent += message.array.nbytes
        if World(0, self.size, self.local_size).leaves_node(message.scope):
            self.bytes_across += message.array.nbytes
