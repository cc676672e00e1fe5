"""`Aggregator`: what users of mpi4py call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

import numpy as np
from mpi4py import MPI

from hvd_compress.checkpoint import agreement
from hvd_compress.checkpoint.saving import SaveLoadMixin
from hvd_compress.checkpoint.state_dict import PendingStates, Saved, from_dict, to_dict
from hvd_compress.core.bucketing import DEFAULT_MERGE, Gradient, Merge, advise, check_merge, gradient, plan
from hvd_compress.core.collectives import World
from hvd_compress.core.router import Routable
from hvd_compress.engine.session import Session
from hvd_compress.engine.spec import as_router
from hvd_compress.engine.stats import Meter, Stats
from hvd_compress.errors import GradientError, StateError
from hvd_compress.methods.wrappers.measure import vnmse
from hvd_compress.methods.wrappers.router import check_fixed
from hvd_compress.mpi.transport import Arr, MPITransport
from hvd_compress.ops.numpy_compiled import NumpyCompiledOps

_SOUND, _SPOILT, _NEW, _REFUSED = range(4)
"""Status of a rank's gradients before the exchange; the worst status of all ranks counts."""


class Aggregator(SaveLoadMixin):
    """Means of numpy arrays over the ranks of an MPI communicator, compressed on their way.

    A dict of named gradients is treated as a model: policies choose what is compressed, and tensors are merged. A bare
    array is always compressed as a whole. It gives what `hvd_compress.LocalWorld` gives, up to the order in which MPI
    sums; only saturating sums may clip elsewhere (`hvd_compress.mpi.operators.saturating_sum`).

    All ranks call `step` together. A program that makes many aggregators, one after another, closes each: MPI libraries
    have few communicators, some 2,000. Either by `close` or by a block::

        with Aggregator("topk:ratio=0.01") as aggregator:
            means = aggregator.step(grads)

    A pickled aggregator has ``method``, ``comm`` and ``merge`` only, and no state; ``comm`` must be one of MPI's own.

    Args:
        method: A method or its spec. With ``hierarchical=on``, all ranks create the aggregator together.
        comm: An intracommunicator, of which a duplicate is used. It is made in the first step.
        merge: Assignment of gradients to buckets; see `hvd_compress.core.bucketing.plan`.

    Raises:
        SpecError: If the spec or ``merge`` is not allowed.
    """

    def __init__(self, method: Routable | str, comm: MPI.Comm = MPI.COMM_WORLD, merge: Merge = DEFAULT_MERGE) -> None:
        check_merge(merge)
        self.method = as_router(method)
        check_fixed(self.method, "by MPI alone")
        self.merge = merge
        self._given = comm
        self._meter = Meter()
        self._transport = MPITransport(comm, self._meter, None if self.method.hierarchical else 1)
        self._session: Session | None = None
        self._loaded = PendingStates()
        self._agreed = False
        self._restored = ""

    def __repr__(self) -> str:
        return f"Aggregator({str(self.method)!r}, merge={self.merge!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.method, self._given, self.merge)

    def __enter__(self) -> Aggregator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the duplicate of the communicator: on all ranks together, after their last step.

        What can be read (`residual`, `stats`, `state_dict`, `save`) stays.
        """
        self._transport.close()

    @overload
    def step(self, grads: Mapping[str, Arr]) -> dict[str, Arr]: ...

    @overload
    def step(self, grads: Arr) -> Arr: ...

    def step(self, grads: Mapping[str, Arr] | Arr) -> dict[str, Arr] | Arr:
        """Exchange the gradients of one step.

        Args:
            grads: This rank's gradient or gradients by name; they are left alone. The same names, shapes and dtypes
                (float16, float32 or float64) on all ranks and in each step.

        Returns:
            The mean over the ranks, as far as the method tells: equal on all of them, in the shape and dtype of the
            input. If any gradient of any rank is not finite, all of it is nan and no state changes.

        Raises:
            GradientError: If the gradients have changed or cannot be compressed, here or on another rank.
            DisagreementError: In the first step, if the ranks differ in method, ``merge`` or gradients.
            StateError: In the first step, if a state that was loaded does not fit the gradients.
            ExchangeError: If the aggregator is closed.
        """
        if not isinstance(grads, Mapping):
            return self._step({"": grads}, self.method.core)[""]
        return self._step(grads, self.method)

    def _step(self, grads: Mapping[str, Arr], method: Routable) -> dict[str, Arr]:
        problem: Exception | None = None
        arrays: dict[str, Arr] = {}
        try:
            arrays = {name: np.asarray(grad) for name, grad in grads.items()}
            session = self._fitting([gradient(name, a.shape, a.dtype.name) for name, a in arrays.items()], method)
            finite = _SOUND if all(np.isfinite(array).all() for array in arrays.values()) else _SPOILT
            verdict = finite if self._agreed else _NEW
        except Exception as error:  # whatever it is, the others must not wait for this rank
            problem, verdict = error, _REFUSED
        agreed = self._transport.highest(verdict)
        self._meter.bytes_sent += 1
        if problem is not None:
            raise problem
        if agreed == _REFUSED:
            raise GradientError(
                "another rank could not take part in this step, its own error says why; nothing was sent"
            )
        if agreed == _NEW:
            self._agree(session, method)
            agreed = self._transport.highest(finite)
        if agreed == _SPOILT:
            return {name: np.full_like(array, np.nan) for name, array in arrays.items()}
        means = self._exchange(session, list(arrays.values()))
        self._meter.steps += 1
        self._meter.gradient_bytes += sum(array.nbytes for array in arrays.values())
        return dict(zip(arrays, means, strict=True))

    def _exchange(self, session: Session, arrays: list[Arr]) -> list[Arr]:
        """Return the means of the gradients; take over the new states if all means are finite."""
        merged = (session.merged(planned, arrays) for planned in session.plan)
        totals, states = session.exchange(merged, self._transport, self._meter)
        with self._meter.time("decode"):
            pieces = session.pieces([total / self._transport.world.size for total in totals])
            means = [
                np.copy(a) if piece is None else piece.astype(a.dtype) for piece, a in zip(pieces, arrays, strict=True)
            ]
            if all(np.isfinite(mean).all() for mean in means):
                session.states = states
                session.steps += 1
        return means

    def _agree(self, session: Session, method: Routable) -> None:
        """Make sure that all ranks have the same method and gradients, and go on from the same saved state."""
        facts = agreement.describe(method, self.merge, session.gradients, self._transport.world, self._restored)
        session.job = agreement.check(self._transport.gather_bytes(facts))
        self._session, self._loaded = session, PendingStates()
        self._agreed, self._restored = True, ""

    def _fitting(self, gradients: list[Gradient], method: Routable) -> Session:
        """The session of these gradients, in the first step a new one."""
        if self._session is None:
            world = self._transport.world
            advise(gradients, method, world)
            session = Session(gradients, plan(gradients, method, self.merge), NumpyCompiledOps(), world)
            self._restored = ""
            self._restore(session, self._loaded)
            return session
        if gradients != list(self._session.gradients):
            raise GradientError(
                f"the gradients have changed: they were {self._session.gradients}, now they are {gradients}"
            )
        return self._session

    def residual(self) -> dict[str, Arr]:
        """Return this rank's residuals by gradient name (``""`` for a bare array); empty without error feedback."""
        return self._session.residual() if self._session else {}

    def stats(self) -> Stats:
        """Return bytes and times of this rank so far, without steps with gradients that are not finite.

        They include one byte per step, by which ranks agree that all gradients are finite, but not the verification in
        the first step, nor the lengths of arrays of unequal length that MPI gathers (8 bytes each).
        """
        return self._meter.read(waits=True)._replace(vnmse=vnmse(self._session.states if self._session else []))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank: residuals, warm starts and step counts.

        Returns:
            Nested dicts of numpy arrays, numbers and strings. Each rank has its own state.
        """
        return to_dict(self._saved(), lambda leaf: leaf)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state, at once or in the first step.

        Args:
            state: State from `state_dict` on the same rank; all ranks load at the same place in the program.

        Raises:
            StateError: If it is not a saved state, or belongs to another method, rank, world size or model. Nothing is
                changed.
        """
        self._load([from_dict(state, lambda leaf: leaf)])

    def _world(self) -> World:
        return self._transport.world

    def _saved(self) -> Saved:
        sessions = {self._session.label: self._session.saved()} if self._session else {}
        return self._loaded.join(str(self.method), self._transport.world, sessions)

    def _load(self, saved: list[Saved]) -> None:
        loaded = PendingStates()
        loaded.put(saved, str(self.method))
        if self._session is None:
            self._loaded = loaded
        else:
            self._restore(self._session, loaded)

    def _restore(self, session: Session, loaded: PendingStates) -> None:
        """Restore the loaded state of a session, if any; the ranks compare it in their next step."""
        if not loaded.names():
            return
        saved = loaded.find(session.label, session.by_bucket(), self._transport.world)
        if saved is None:
            gradients = [g.name for g in session.gradients]
            raise StateError(f"this state is of a model with other gradients than {gradients}")
        session.restore(saved)
        self._agreed, self._restored = False, f"{saved.job:x}, step {saved.steps}"
