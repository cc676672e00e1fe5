"""The exchange of the gradients of a list of variables: their buckets and states, and the call that makes a step."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.checkpoint import agreement, state_files
from hvd_compress.checkpoint.elastic import Membership
from hvd_compress.checkpoint.resharding import BucketSnapshot
from hvd_compress.checkpoint.state_dict import (
    Saved,
    SavedSession,
    refuse_other_parameters,
    restored,
    same_parameters,
)
from hvd_compress.core.bucketing import PRECISION, Gradient, Merge, Planned, advise, gradient, plan
from hvd_compress.core.collectives import State, World
from hvd_compress.core.router import Router
from hvd_compress.engine import session
from hvd_compress.engine.autotune import Tuner
from hvd_compress.engine.race import Race, Stage
from hvd_compress.engine.stats import Meter
from hvd_compress.engine.survey import survey
from hvd_compress.errors import DisagreementError, GradientError, StateError
from hvd_compress.methods.wrappers.router import Auto
from hvd_compress.ops.buffer_pool import BufferPool
from hvd_compress.ops.kernels import cpu
from hvd_compress.ops.numpy_compiled import NumpyCompiledOps
from hvd_compress.tensorflow import verdict
from hvd_compress.tensorflow.host import Arr, call_on_host
from hvd_compress.tensorflow.transport import EagerTransport
from hvd_compress.tensorflow.verdict import Facts, Vote
from hvd_compress.transport.nodes import connects

Tensor: TypeAlias = Any

_GONE = (
    "the variables that this step trains have been deleted, and with them what was kept for them: keep the model for as"
    " long as its step is called"
)


class Ready(NamedTuple):
    """The exchange of one step.

    Attributes:
        totals: The sums over the ranks, one for each gradient; None for those without elements.
        placeholder: Number that Horovod allreduces instead of each gradient: 1, or nan if a gradient is not finite.
        parts: Number of ranks: divisor that makes the totals means.
    """

    totals: list[Tensor | None]
    placeholder: Tensor
    parts: Tensor


def _digest(method: Router, world: World) -> int:
    """Return a checksum of a method, and of the nodes if its state depends on them."""
    nodes = f" {world.local_size}" if method.hierarchical else ""
    return zlib.crc32(f"{method}{nodes}".encode())


class Session(session.Session, tf.train.experimental.PythonState):  # type: ignore[misc]  # TensorFlow is not typed
    """The exchange of the gradients of a list of variables. Checkpoints of TensorFlow save and restore its state.

    Args:
        method: The method, as a router.
        merge: Assignment of gradients to buckets.
        gradients: Name, shape and dtype of each.
        transport: The ranks that take part.
        meter: Counts steps and bytes.

    Attributes:
        transport: The ranks that take part.
        reused: Whether Horovod may run its graph for other variables, so that its state stays.
        from_checkpoint: Whether its state is that of a checkpoint.
        released: Whether `release` has freed the memory of its state.
        refused: The error of `deserialize`, as TensorFlow drops it where a checkpoint has waited for the session.
        race: The race that chooses the method, with ``auto``.
    """

    def __init__(
        self, method: Router, merge: Merge, gradients: Sequence[Gradient], transport: EagerTransport, meter: Meter
    ) -> None:
        advise(gradients, method, transport.world)
        planned = plan(gradients, method, merge)
        # New memory costs more than writing to it. A bucket has a residual, the next one, and a sum.
        self._pool = BufferPool(3 * len(planned))
        session.Session.__init__(self, gradients, planned, NumpyCompiledOps(self._pool), transport.world)
        self._facts = Facts.of(agreement.describe(method, merge, gradients, transport.world))
        self._membership = Membership(zlib.crc32(self.label.encode())) if agreement.elastic() else None
        self._unconnected = method.hierarchical
        self._method, self._meter = method, meter
        self._rank = hvd.rank()
        self.released = False
        self.transport = transport
        self.reused = self.from_checkpoint = False
        self.refused: StateError | None = None
        self.race: Race | None = None
        self.tune()

    def tune(self, saved: Sequence[Sequence[float]] | None = ()) -> None:
        """Start to choose the method by step times, if it is ``auto``.

        Args:
            saved: What `search` returned, to go on with that choice.
        """
        if isinstance(self._method, Auto):
            adam = self.race is None or self.race.adam
            self.race = Race(self._method, adam, self.world.size, saved or ())
            self._tuner = Tuner(self.race, self.label)
            self._unconnected = self._method.tries_nodes

    @property
    def search(self) -> Sequence[Sequence[float]] | None:
        """The choice so far, to be saved; None if the method is not ``auto``."""
        return None if self.race is None else self.race.saved

    def serialize(self) -> bytes:
        """Return the state, for a checkpoint of TensorFlow."""
        leaves = {f"{one.bucket.key}/{path}": leaf for one in self.kept() for path, leaf in one.leaves.items()}
        header = {"origin": self._origin, "steps": self.steps, "job": self.job, "search": self.search}
        return state_files.dump(leaves, header)

    def deserialize(self, string_value: bytes) -> None:
        """Take over the state of a checkpoint of TensorFlow.

        Raises:
            StateError: If it was saved by another rank, world size or method, or does not fit. Nothing is changed.
        """
        try:
            self._take_over(*state_files.parse(string_value))
        except StateError as error:
            self.refused = error
            raise
        self.from_checkpoint = True

    def _take_over(self, leaves: Mapping[str, Any], header: Mapping[str, Any]) -> None:
        rank, size, method = header["origin"]
        if header["origin"] != self._origin:
            by = "" if method == self._origin[2] else " by another method"
            raise StateError(
                f"the checkpoint was saved on rank {rank} of {size}{by} and cannot be restored on rank"
                f" {self.world.rank} of {self.world.size}: each rank and method has residuals of its own; restore with"
                " the same number of ranks, each from its own checkpoint"
            )
        buckets: dict[str, dict[str, Any]] = {planned.bucket.key: {} for planned in self.plan}
        for path, leaf in leaves.items():
            key, _, name = path.partition("/")
            buckets.setdefault(key, {})[name] = leaf
        saved = SavedSession(
            rank,
            size,
            header["steps"],
            buckets,
            search=header.get("search"),
            job=header["job"],
            local_size=self.world.local_size,
        )
        self.restore(restored([Saved("", rank, size, {"": saved})], "", self.by_bucket(), self.world))

    @property
    def _origin(self) -> list[int]:
        return [self.world.rank, self.world.size, _digest(self._method, self.world)]

    def saved(self) -> SavedSession:
        """Return the state, in the form that is written to files."""
        return super().saved()._replace(process_set=self.transport.members, search=self.search)

    def restore(self, saved: SavedSession) -> None:
        """Take over copies of states that have been checked, and the choice of ``auto``."""
        super().restore(saved)
        self.tune(saved.search)

    def by_bucket(self, saved: SavedSession | None = None) -> dict[str, BucketSnapshot]:
        """Return the states by the keys of the buckets.

        Raises:
            StateError: If the saved state is of other parameters.
        """
        if saved is not None and not same_parameters(saved, self.gradients):
            refuse_other_parameters(saved.gradients, self.gradients)
        return super().by_bucket()

    def build(self, gradients: Sequence[Tensor], scale: Tensor | None = None, factor: float = 1.0) -> Ready:
        """Exchange the gradients of one step: at once in eager mode, else whenever the current graph is run.

        Args:
            gradients: One tensor for each gradient of the session.
            scale: Loss scale of the gradients; the state is in unscaled units. None for no scale.
            factor: Factor by which Horovod will multiply the sums.
        """
        full = [i for i, one in enumerate(gradients) if 0 not in one.shape]
        narrow = [gradients[i].dtype.as_numpy_dtype for i in full]
        given = [tf.cast(gradients[i], PRECISION[gradients[i].dtype.name]) for i in full]
        scales = [] if scale is None else [tf.cast(scale, tf.float64)]

        def step(*arrays: Arr) -> list[Arr]:
            every: list[Any] = [None] * len(gradients)
            for i, array in zip(full, arrays, strict=False):
                every[i] = array
            scale = float(arrays[-1]) if scales else None
            return self._step(every, scale, factor, dict(zip(full, narrow, strict=True)))

        dtypes = [*(one.dtype for one in given), tf.float64, tf.float64]
        *sums, placeholder, parts = call_on_host(step, [*given, *scales], dtypes)
        totals: list[Tensor | None] = [None] * len(gradients)
        for i, total in zip(full, sums, strict=True):
            total.set_shape(gradients[i].shape)
            totals[i] = total
        placeholder.set_shape([1])
        parts.set_shape([])
        return Ready(totals, placeholder, parts)

    def _step(self, arrays: list[Any], scale: float | None, factor: float, narrow: dict[int, Any]) -> list[Arr]:
        """Make a step.

        Args:
            arrays: The gradients; None for those without elements.
            scale: The loss scale, if there is one.
            factor: Factor by which Horovod will multiply the sums.
            narrow: Dtypes of the gradients in the model, by their positions.

        Returns:
            The sums of those that have elements, the placeholder, and the number of ranks.
        """
        self._find_ranks()
        present, size = [array for array in arrays if array is not None], self.world.size
        if self._membership is not None:
            factor = 1 / size  # it was read off while the graph was traced, by another number of ranks
            if size == 1:  # Horovod takes the gradients as they are, so nothing must be kept of them
                return [*present, np.ones(1), np.array(1.0)]
        merged = [
            self._compensated(planned, arrays, scale or 1.0, s)
            for planned, s in zip(self.plan, self.states, strict=True)
        ]
        nonfinite = sum(bad for _, bad in merged)
        finite, self.job, nodes = verdict.decide(
            Vote(self._facts, nonfinite, self.steps, self.job, self._rank), self.transport
        )
        self._connect(nodes)
        self._meter.steps += 1
        self._meter.gradient_bytes += sum(array.nbytes for array in present)
        self._meter.bytes_sent += verdict.BYTES + 8 * len(arrays)
        self.steps += 1
        if not finite:
            self._end(counts=False)
            return [*present, np.full(1, np.nan), np.array(float(size))]
        if self.race is not None:
            self._choose(self.race, arrays, scale)
        vectors = (merged.pop(0)[0] for _ in self.plan)
        totals, states = self.exchange(vectors, self.transport, self._meter, compensated=True)
        if scale is not None:
            totals = [total * total.dtype.type(scale) for total in totals]
        fits = all(self._fits(planned, total, factor, narrow) for planned, total in zip(self.plan, totals, strict=True))
        if fits:
            self.states = states
        self._end(counts=fits)
        pieces = [piece for piece in self.pieces(totals) if piece is not None]
        return [*pieces, np.ones(1), np.array(float(size))]

    def _connect(self, nodes: bool) -> None:
        """Connect the ranks within nodes and across nodes, or tell the race that it cannot be done."""
        if self._unconnected and self.race is not None:
            self.race.place(nodes and connects(self.transport))
        elif self._unconnected:
            self.transport.connect()
        self._unconnected = False

    def _choose(self, race: Race, arrays: list[Any], scale: float | None) -> None:
        """Choose the method of a step, after a survey of its gradients if the race asks for one."""
        self.choose(race.choice)
        if race.asks is Stage.SURVEY:
            true = arrays if scale is None else [None if a is None else a / a.dtype.type(scale) for a in arrays]
            race.facts = survey(self.parts(true), race.surveyed, self.world, self.transport.missing)

    def _end(self, counts: bool) -> None:
        """Tell the race, if any, that a step has ended, and whether its state is kept."""
        if self.race is None:
            return
        if counts:
            self._tuner.end_step(self.transport)
            self._tuner.decide(self.transport)
        else:
            self._tuner.skip_step()

    def _find_ranks(self) -> None:
        """Check that the state is there, and of the ranks that there are; in an elastic job, reshard it if not.

        Raises:
            StateError: If the state has been released.
            DisagreementError: If Horovod has been started with other ranks, or a new rank is not set up as the others.
        """
        if self.released:
            raise StateError(_GONE)
        if self._membership is not None:
            self._meet(self._membership)
        elif not self.transport.has_same_size():
            raise DisagreementError(verdict.RESTARTED)

    def _meet(self, membership: Membership) -> None:
        """In an elastic job, find out at the beginning of a step whether the ranks are still the same."""
        self.transport = self.transport.renewed()
        self.world, self._rank = self.transport.world, hvd.rank()
        meeting = membership.meet(self.world, self.steps, self.transport.gather_bytes, self._facts.line, self.by_bucket)
        if meeting is not None:
            self.job = meeting.job
            if meeting.leaves:
                self.restore(
                    SavedSession(self.world.rank, self.world.size, meeting.steps, meeting.leaves, job=meeting.job)
                )

    def _compensated(self, planned: Planned, arrays: list[Any], scale: float, state: State) -> tuple[Arr, int]:
        """Add up residual and unscaled gradients of a bucket.

        Returns:
            The sum, without the gradients that are not finite, and the number of these.
        """
        residual = planned.method.residual(state)
        numel, dtype = planned.bucket.numel, planned.bucket.dtype
        x, start, bad = self._pool.take(numel) if dtype == "float32" else np.empty(numel, dtype), 0, 0
        for i in planned.members:
            grad = arrays[i].reshape(-1)
            here = slice(start, start + grad.size)
            kept = None if residual is None else residual[here]
            bad += not _absorb(x[here], kept, grad, scale)
            start += grad.size
        return x, bad

    def _fits(self, planned: Planned, total: Arr, factor: float, narrow: dict[int, Any]) -> bool:
        """Return whether a sum, which is the same on all ranks, is finite, and its result in the gradients' dtypes."""
        peak = self.ops.absmax(total)
        with np.errstate(over="ignore"):
            results = [dtype(peak * total.dtype.type(factor)) for dtype in {narrow[i] for i in planned.members}]
        return bool(np.isfinite(peak) and all(np.isfinite(result) for result in results))

    def release(self) -> None:
        """Free the memory of the state: graphs that nobody calls any more keep the session."""
        self.released, self.states = True, []
        self._pool.clear()


class CallSession(Session):
    """The exchange of a direct call, whose state belongs to its name."""

    gradients = ()


def _absorb(out: Arr, residual: Arr | None, grad: Arr, scale: float) -> bool:
    """Write ``residual + grad / scale``, without a gradient that is not finite; return whether it is finite."""
    if grad.dtype == np.float32 and residual is not None:
        return cpu.absorb_at(out.ctypes.data, residual.ctypes.data, grad.ctypes.data, grad.size, scale)
    if grad.dtype == np.float32 and scale == 1:
        return cpu.put_finite_at(out.ctypes.data, grad.ctypes.data, grad.size)
    with np.errstate(over="ignore"):
        np.divide(grad, grad.dtype.type(scale), out=out)
    finite = bool(np.isfinite(out).all())
    if not finite:
        out.fill(0)
    if residual is not None:
        out += residual
    return finite


def describe(tensor: Any, parameter: Any) -> Gradient:
    """Name, shape and dtype of a gradient of a variable, or of a tensor in a direct call.

    Raises:
        GradientError: If the dtype cannot be compressed, or the shape is not known.
    """
    name = parameter if isinstance(parameter, str) else name_of(parameter)
    if not tensor.shape.is_fully_defined():
        raise GradientError(
            f"the tensor {name!r} has shape {tensor.shape}, but state is kept for a shape that is known while the"
            " graph is traced; set it with tf.ensure_shape, or use Compression.none or .fp16"
        )
    return gradient(name, tuple(tensor.shape), tensor.dtype.name)


def name_of(variable: Any) -> str:
    """A name for a variable that all ranks and restarted jobs share.

    Keras numbers the names of layers by how many there were before in the process, so numbers are left out.
    """
    return re.sub(r"_\d+(?=[/:]|$)", "", variable.name)
